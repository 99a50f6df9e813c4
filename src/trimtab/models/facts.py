"""What a model folder says about itself, read from its JSON files and weight headers alone: no weights, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.errors import ModelError
from trimtab.models.families import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    NO_POSITIONS,
    POSITIONS_AFTER_PADDING,
)
from trimtab.models.weight_files import Weights, check_weights

JSON_LIMIT_BYTES = 50_000_000

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_CODE_KEYS = frozenset({"auto_map", "custom_pipelines", "_target_", "use_kernels", "attn_implementation"})
_CODE_PREFIXES = ("_attn_implementation", "_experts_implementation")


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model folder."""

    path: Path
    model_type: str
    architectures: tuple[str, ...]
    is_decoder: bool
    """Each position sees only what stands before it."""
    can_generate: bool
    is_encoder_decoder: bool
    max_positions: int | None
    """Longest input in tokens (RoBERTa's table of 514 gives 512); None where the model sets no limit."""
    vocab_size: int | None
    hidden_size: int | None
    num_layers: int | None
    label_names: tuple[str, ...]
    """Names of the classes where the folder has real ones (not LABEL_0), in the order of their ids."""
    problem_type: str | None
    has_chat_template: bool
    dtype: str
    """torch's name of the type of most weights, such as `bfloat16`."""
    parameter_count: int
    """Numbers in the weight files, heads that the task drops included."""
    weight_bytes: int
    licence: str | None
    """What the front matter of README.md says, else None."""
    pad_id: int | None
    trust_remote_code: bool = False
    notes: tuple[str, ...] = field(default=())
    """What the user should know, one sentence each."""

    @property
    def kind(self) -> str:
        """`encoder`, `decoder` or `encoder-decoder`."""
        if self.is_encoder_decoder:
            return "encoder-decoder"
        return "decoder" if self.is_decoder else "encoder"


def read_facts(folder: Path, *, trust_remote_code: bool = False) -> ModelFacts:
    """Facts of a folder that `trimtab.models.source.resolve` gave.

    Raises:
        ModelError: no folder, no readable config.json, no whole weights, quantised weights.
    """
    config = read_config(folder)
    weights = check_weights(folder)
    model_type = _model_type(folder, config)
    _refuse_quantised(folder, config)
    text = _text_config(config)
    _check_sizes(folder, text)
    architectures = tuple(str(name) for name in config.get("architectures") or ())
    is_encoder_decoder = bool(config.get("is_encoder_decoder")) or model_type in ENCODER_DECODERS
    is_decoder = not is_encoder_decoder and _is_decoder(model_type, architectures, config)
    return ModelFacts(
        path=folder,
        model_type=model_type,
        architectures=architectures,
        is_decoder=is_decoder,
        can_generate=is_decoder or is_encoder_decoder,
        is_encoder_decoder=is_encoder_decoder,
        max_positions=_max_positions(model_type, text),
        vocab_size=_whole(text, "vocab_size"),
        hidden_size=_whole(text, "hidden_size", "n_embd", "d_model", "dim", "embedding_size"),
        num_layers=_whole(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        label_names=_label_names(config),
        problem_type=_text(config.get("problem_type")),
        has_chat_template=_has_chat_template(folder),
        dtype=weights.dtype,
        parameter_count=weights.elements,
        weight_bytes=weights.weight_bytes,
        licence=read_licence(folder),
        pad_id=_whole(text, "pad_token_id"),
        trust_remote_code=trust_remote_code,
        notes=_notes(folder, config, weights, trust_remote_code),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder as it stands.

    Raises:
        ModelError: no folder, no config.json, or not a JSON object.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder.", cure="Give the folder of a transformers model as `model.path`.")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is not the folder of a transformers model.",
            cure="Give the folder that holds config.json, tokenizer.json and model.safetensors.",
        )
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder.

    Raises:
        ModelError: not UTF-8, not JSON, not an object, or larger than 50 MB.
    """
    size = path.stat().st_size
    if size > JSON_LIMIT_BYTES:
        raise ModelError(f"{path} has {size:,} bytes; at most {JSON_LIMIT_BYTES:,} are read.", cure="Mend the file.")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 at byte {error.start}.", cure="Download the file again.") from None
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{error.msg} at column {error.colno}.", location=f"{path}:{error.lineno}", cure="Download the file again."
        ) from None
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply.", cure="Download the file again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object.", cure="Download the file again.")
    return content


def without_code_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the keys that make a loader fetch or run code."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if not _pulls_code(key):
            kept[key] = without_code_keys(value) if isinstance(value, dict) else value
    return kept


def _pulls_code(key: str) -> bool:
    return key in _CODE_KEYS or key.startswith(_CODE_PREFIXES)


def _model_type(folder: Path, config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelError(
            f"{folder / 'config.json'} does not say its `model_type`.",
            cure='Add it, for instance "model_type": "bert"; the model\'s page names it.',
        )
    return model_type


def _refuse_quantised(folder: Path, config: Mapping[str, Any]) -> None:
    settings = config.get("quantization_config")
    if isinstance(settings, dict):
        method = settings.get("quant_method", "an unknown method")
        raise ModelError(
            f"The weights of {folder} are quantised ({method}); they cannot be trained as they are.",
            cure="Give the unquantised model, or its GGUF file, as `model.path`.",
        )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _check_sizes(folder: Path, config: Mapping[str, Any]) -> None:
    """A size that is text, a fraction or below 1: every later message about it would blame something else."""
    for name in _SIZES:
        value = config.get(name)
        if isinstance(value, (str, float, bool)) or (isinstance(value, int) and value < 1):
            raise ModelError(
                f"{folder / 'config.json'}: {name} is {json.dumps(value)[:60]}, a whole number above 0 is needed.",
                cure="Take the config.json that belongs to the weights.",
            )


def _is_decoder(model_type: str, architectures: tuple[str, ...], config: Mapping[str, Any]) -> bool:
    if model_type in ENCODERS:
        return bool(config.get("is_decoder"))
    if model_type in DECODERS:
        return True
    return any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in architectures)


def _max_positions(model_type: str, config: Mapping[str, Any]) -> int | None:
    if model_type in NO_POSITIONS:
        return None
    positions = _whole(
        config, "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length"
    )
    if positions is None or positions <= 0:
        return None
    if model_type in POSITIONS_AFTER_PADDING and config.get("position_embedding_type", "absolute") == "absolute":
        padding = _whole(config, "pad_token_id")
        return positions - (1 if padding is None else padding) - 1
    return positions


def _label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    table = config.get("id2label")
    if not isinstance(table, dict):
        return ()
    try:
        names = {int(key): str(name) for key, name in table.items()}
    except ValueError:
        return ()
    if sorted(names) != list(range(len(names))) or len(set(names.values())) != len(names):
        return ()
    ordered = tuple(names[index] for index in range(len(names)))
    return () if all(re.fullmatch(r"LABEL_\d+", name) for name in ordered) else ordered


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(read_json(path).get("chat_template"))


def read_licence(folder: Path) -> str | None:
    """The licence that the front matter of a folder's README.md names, else None."""
    path = folder / "README.md"
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(20_000)
    front = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---", head, flags=re.DOTALL)
    line = re.search(r"^licen[sc]e:[ \t]*([^\r\n]+)", front.group(1), flags=re.MULTILINE) if front else None
    name = line.group(1).strip().strip("'\"") if line else ""
    return name[:80] or None


def _notes(folder: Path, config: Mapping[str, Any], weights: Weights, trusted: bool) -> tuple[str, ...]:
    notes: list[str] = []
    source = folder / "gguf_source.json"
    if source.is_file():
        said = read_json(source).get("note")
        if isinstance(said, str):
            notes.append(said)
    pulling = sorted(key for key in config if _pulls_code(key))
    if pulling and not trusted:
        notes.append(f"config.json asks to load code ({', '.join(pulling)}); that is ignored.")
    if weights.dtype == "float16":
        notes.append("The weights are stored in float16; they train with float32 masters.")
    return tuple(notes)


def _whole(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of `names` that holds a whole number."""
    for name in names:
        value = config.get(name)
        if type(value) is int:
            return value
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
