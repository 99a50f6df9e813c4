"""The border to transformers: tokenizers and models are loaded and saved here and nowhere else.

transformers takes over a second to import, so every import of it stands inside the function that needs it; the Trainer
is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.data.task import LANGUAGE_KINDS, TaskSpec
from trimtab.errors import ModelError, did_you_mean
from trimtab.models.facts import ModelFacts, read_config, read_facts, without_code_keys
from trimtab.models.heads import auto_class_name, check_task

__all__ = [
    "Loaded",
    "LoadedTokenizer",
    "ModelFacts",
    "load_model",
    "load_tokenizer",
    "read_facts",
    "register_attention",
    "save_config",
    "save_model",
    "set_attention",
]

# Reserved tokens that families keep for padding or leave unused, best first. None ends a text in its family.
_SPARE_PADS = (
    "<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|vision_pad|>", "<unk>", "<|endoftext|>",
)  # fmt: skip
_PROBLEM_TYPES = {
    "classification": "single_label_classification",
    "multilabel_classification": "multi_label_classification",
    "regression": "regression",
}
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)


@dataclass(frozen=True)
class LoadedTokenizer:
    """A fast tokenizer with a padding token."""

    tokenizer: Any
    pad_id: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A model ready for its task."""

    model: nn.Module
    new_weights: tuple[str, ...]
    """Parameters that the folder does not have: the new head, seeded."""
    unused_weights: tuple[str, ...]
    """Tensors of the folder that this task does not use."""
    notes: tuple[str, ...]


@contextmanager
def _quiet() -> Generator[None]:
    """transformers' progress bars and load reports kept off the terminal; what they say is in `Loaded`."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> LoadedTokenizer:
    """The folder's fast tokenizer; a padding token is chosen from its own vocabulary when it names none.

    Raises:
        ModelError: a family transformers does not know, no tokenizer, one that cannot be read, or a slow one.
    """
    _check_known_family(folder, trust_remote_code)
    from transformers import AutoTokenizer

    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, use_fast=True, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelError(
            f"The tokenizer in {folder} cannot be read: {_first_line(error)}.",
            cure="Copy tokenizer.json and tokenizer_config.json of the same model into that folder.",
        ) from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{folder} has only a slow tokenizer ({type(tokenizer).__name__}); a tokenizer.json is needed.",
            cure="Copy the tokenizer.json of the same model into that folder.",
        )
    notes = _ensure_pad(tokenizer)
    tokenizer.padding_side = "right"
    return LoadedTokenizer(tokenizer=tokenizer, pad_id=int(tokenizer.pad_token_id), notes=notes)


def _ensure_pad(tokenizer: Any) -> tuple[str, ...]:
    if tokenizer.pad_token_id is not None:
        return ()
    vocabulary = tokenizer.get_vocab()
    spare = next(
        (t for t in _SPARE_PADS if t in vocabulary and t not in (tokenizer.eos_token, tokenizer.bos_token)), None
    )
    chosen = spare or tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.pad_token = chosen
    reason = "a spare token" if spare else "it also ends a text; the mask, not the token, tells padding"
    return (f"The tokenizer names no padding token; '{chosen}' pads ({reason}).",)


def _check_known_family(folder: Path, trust_remote_code: bool) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = read_config(folder)
    family = str(config.get("model_type"))
    if family in CONFIG_MAPPING_NAMES or (trust_remote_code and "auto_map" in config):
        return
    if "auto_map" in config:
        raise ModelError(
            f"The family '{family}' of {folder} needs Python code that lies in that folder.",
            cure="Read the code; then set `model.trust_remote_code: true`.",
        )
    raise ModelError(
        f"transformers does not know the family '{family}' of {folder}."
        f" {did_you_mean(family, CONFIG_MAPPING_NAMES).split(' Known:')[0]}".split("Known:")[0].strip(),
        cure="Correct `model_type` in config.json, or install a newer transformers: pip install -U transformers",
    )


def load_model(
    folder: Path,
    facts: ModelFacts,
    spec: TaskSpec,
    *,
    dropout: float | None = None,
    dtype: torch.dtype = torch.float32,
    attn: str = "sdpa",
    seed: int = 0,
    pad_id: int | None = None,
) -> Loaded:
    """The model with the head of the task, in training mode, on the CPU.

    Args:
        dropout: set wherever the model's config has a dropout.
        dtype: of every floating weight.
        attn: transformers' attention implementation; a model without it falls back to `eager`, with a note.
        seed: fixes new weights, whatever was drawn before.
        pad_id: padding token, for decoders that classify (they read the last token that is not padding).

    Raises:
        ModelError: a task the model cannot do; weights that are missing beyond the head, of another shape or not
            finite; a dropout that the model does not have.
    """
    check_task(facts, spec)
    config = _task_config(folder, facts, spec, pad_id)
    _set_dropout(config, facts, dropout)
    model, info, notes = _from_pretrained(folder, facts, spec, config, dtype=dtype, attn=attn, seed=seed)
    new_weights = _check_loaded(model, info, facts)
    _check_finite(model, facts)
    model.train()
    if dtype == torch.float32 and facts.dtype != "float32":
        notes = (*notes, f"The weights are stored in {facts.dtype} and train in float32.")
    return Loaded(
        model=model,
        new_weights=new_weights,
        unused_weights=tuple(sorted(str(key) for key in info["unexpected_keys"])),
        notes=(*facts.notes, *notes),
    )


def _task_config(folder: Path, facts: ModelFacts, spec: TaskSpec, pad_id: int | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    _check_known_family(folder, facts.trust_remote_code)
    try:
        if facts.trust_remote_code:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        else:
            config = CONFIG_MAPPING[facts.model_type].from_dict(without_code_keys(read_config(folder)))
    except Exception as error:  # configs check their fields with exception types of their own
        raise ModelError(
            f"{folder / 'config.json'} is not a config of the family '{facts.model_type}': {_first_line(error)}.",
            cure="Download config.json again.",
        ) from error
    if spec.kind in LANGUAGE_KINDS:
        return config
    names = spec.label_names or ("value",)
    config.num_labels = len(names)  # resets both tables, so it comes first
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.problem_type = _PROBLEM_TYPES.get(spec.kind)  # pyright: ignore[reportAttributeAccessIssue]
    if pad_id is not None and facts.is_decoder:
        config.pad_token_id = pad_id
    return config


def dropout_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a config that hold a dropout probability."""
    return tuple(
        key
        for key, value in config.items()
        if ("dropout" in key or key.endswith("pdrop"))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    )


def _set_dropout(config: Any, facts: ModelFacts, dropout: float | None) -> None:
    if dropout is None:
        return
    keys = dropout_keys(config.to_dict())
    if not keys:
        raise ModelError(
            f"`model.dropout: {dropout:g}` has no effect: the family '{facts.model_type}' has no dropout.",
            cure="Remove `model.dropout` from the job.",
        )
    for key in keys:
        setattr(config, key, dropout)


def _from_pretrained(
    folder: Path, facts: ModelFacts, spec: TaskSpec, config: Any, *, dtype: torch.dtype, attn: str, seed: int
) -> tuple[nn.Module, dict[str, Any], tuple[str, ...]]:
    import transformers

    auto_class = getattr(transformers, auto_class_name(spec.kind))
    options: dict[str, Any] = {"config": config, "dtype": dtype, "use_safetensors": True, "local_files_only": True}
    options |= {
        "trust_remote_code": facts.trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    notes: tuple[str, ...] = ()
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            try:
                model, info = auto_class.from_pretrained(folder, attn_implementation=attn, **options)
            except ValueError as error:
                if attn == "eager" or "attention" not in str(error).lower():
                    raise
                notes = (f"This model has no '{attn}' attention; 'eager' is used.",)
                torch.manual_seed(seed)
                model, info = auto_class.from_pretrained(folder, attn_implementation="eager", **options)
        except _LOAD_ERRORS as error:
            if isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
                raise ModelError(
                    f"The family '{facts.model_type}' has no head for {spec.kind.replace('_', ' ')} in transformers.",
                    cure="Take a model of another family, or another `task.kind`.",
                ) from error
            raise ModelError(
                f"The model in {folder} cannot be loaded: {_first_line(error)}.", cure="Download the model again."
            ) from error
    return model, info, notes


def _check_loaded(model: nn.Module, info: Mapping[str, Any], facts: ModelFacts) -> tuple[str, ...]:
    """The names of new weights, after seeing that only the head is new."""
    from trimtab.models.blocks import head_names

    heads = head_names(model)
    mismatched = sorted(info["mismatched_keys"], key=lambda entry: str(entry[0]))
    foreign = [entry for entry in mismatched if not _is_head(str(entry[0]), heads)]
    if foreign:
        name, stored, built = foreign[0]
        raise ModelError(
            f"{len(foreign)} weights of {facts.path} do not fit its config.json: '{name}' has shape {list(stored)} in"
            f" the file and {list(built)} by the config.",
            cure="Take config.json, tokenizer and weights from the same model.",
        )
    new = sorted({str(key) for key in info["missing_keys"]} | {str(entry[0]) for entry in info["mismatched_keys"]})
    missing = [name for name in new if not _is_head(name, heads)]
    if missing:
        raise ModelError(
            f"{facts.path} lacks {len(missing)} of the {sum(1 for _ in model.parameters())} weights that"
            f" {type(model).__name__} needs, such as '{missing[0]}'; it has {len(info['unexpected_keys'])} others.",
            cure="Take a folder whose config.json and weights belong together.",
        )
    return tuple(new)


def _check_finite(model: nn.Module, facts: ModelFacts) -> None:
    """One infinite or NaN weight makes every loss NaN, which would look like a learning rate that is too high."""
    for name, weight in model.named_parameters():
        if (
            weight.is_floating_point()
            and weight.numel()
            and not all(torch.isfinite(torch.stack(weight.detach().aminmax())))
        ):
            raise ModelError(
                f"{facts.path} holds a weight that is not a finite number, in '{name}'.",
                cure="Download the model again, or take a checkpoint from before its training failed.",
            )


def _is_head(name: str, heads: tuple[str, ...]) -> bool:
    """Whether a parameter lies in the head, or in the pooler, which many checkpoints lack."""
    return name.startswith(tuple(f"{head}." for head in heads)) or ".pooler." in f".{name}"


def save_model(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Writes an ordinary transformers folder: config, safetensors, tokenizer, chat template, generation config.

    `folder` exists; the caller writes aside and renames. `tokenizer` is the tokenizer itself, not `LoadedTokenizer`.
    A model of several types becomes float32 in place: its config can name one type only, and loaders round to that.
    """
    if len({p.dtype for p in model.parameters() if p.is_floating_point()}) > 1:
        model.float()
    with _quiet():
        model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)


def save_config(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Writes config and tokenizer without weights, beside an adapter."""
    with _quiet():
        model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        tokenizer.save_pretrained(folder)


def register_attention(name: str, attention_fn: Callable[..., Any], mask_fn: Callable[..., Tensor | None]) -> None:
    """Makes an attention function and its mask function known to transformers under `name`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_fn)
    AttentionMaskInterface.register(name, mask_fn)


def set_attention(model: nn.Module, name: str) -> str:
    """Switches the attention of a loaded model; returns the name that was set before.

    Raises:
        ModelError: the model cannot switch.
    """
    before = str(model.config._attn_implementation)  # type: ignore[union-attr]
    try:
        with _quiet():
            model.set_attn_implementation(name)  # type: ignore[operator]
    except (ValueError, ImportError, AttributeError) as error:
        raise ModelError(f"{type(model).__name__} cannot use '{name}' attention: {_first_line(error)}.") from error
    return before


def _first_line(error: BaseException) -> str:
    """An error of another library, short enough for one line."""
    lines = str(error).strip().splitlines()
    return (lines[0][:200] if lines else type(error).__name__).rstrip(". ")
