"""A GGUF file made an ordinary transformers folder: weights dequantised, config and tokenizer rebuilt.

transformers reads GGUF too, but refuses to save what it read, and takes several times as long. Families whose tensors
map one to one are converted here: llama (with SmolLM and Mistral, which use its layout), qwen2 and qwen3.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf.constants import GGMLQuantizationType

from trimtab.errors import ModelError
from trimtab.models.gguf_file import GgufFile, GgufTensor
from trimtab.models.gguf_tensors import ORIGINAL, PLAIN, load_tensor, rows_in_halves, to_bfloat16
from trimtab.models.gguf_tokenizer import write_tokenizer
from trimtab.models.weight_files import SINGLE_FILE, TensorEntry, write_safetensors

FORMAT_VERSION = 1
"""Raised whenever the same file would give another folder, so that caches are remade."""
FULL_PRECISION_LIMIT_BYTES = 4 * 1024**3
SUPPORTED = ("llama", "qwen2", "qwen3")

StoredType = Literal["float32", "bfloat16"]

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Shape:
    """The sizes that tensors are checked against."""

    blocks: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int


def convert(path: Path, folder: Path, *, dtype: StoredType | None = None) -> None:
    """Writes an ordinary model folder from the GGUF file at `path` into `folder`, which exists and is empty.

    `dtype` of the weights: float32 gives exactly the numbers the file stands for; left out it is float32 while that
    takes at most 4 GiB, above it (or where the file itself holds bfloat16) bfloat16. Memory never holds more than one
    tensor.

    Raises:
        ModelError: not a GGUF file, cut off, a family or a tensor type that is not read here, missing tensors.
    """
    with GgufFile(path) as file:
        shape = _read_shape(file)
        names = _tensor_names(file, shape)
        kept = dtype or _choose_dtype(file)
        config = _config(file, shape, names, kept)
        _write_weights(file, folder, shape, names, kept)
        roles = write_tokenizer(file.metadata, folder, source=path, max_length=config["max_position_embeddings"])
        config |= {f"{role}_token_id": index for role, index in roles.items() if role in ("bos", "eos", "pad")}
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(file, roles))
        _write_json(folder / "gguf_source.json", _source(file, path))
        _write_card(folder, file.metadata)


def _meta(file: GgufFile, key: str, default: Any = None) -> Any:
    """A value of the family's own metadata, such as `llama.block_count`."""
    value = file.metadata.get(f"{file.metadata['general.architecture']}.{key}", default)
    if value is None:
        raise ModelError(f"{file.path} does not say `{key}`.", cure=ORIGINAL)
    return value


def _read_shape(file: GgufFile) -> Shape:
    family = file.metadata.get("general.architecture")
    if family not in SUPPORTED:
        raise ModelError(
            f"{file.path} holds a model of the family '{family}'; from GGUF, {', '.join(SUPPORTED)} are read.",
            cure=ORIGINAL,
        )
    if file.metadata.get(f"{family}.expert_count", 0):
        raise ModelError(f"{file.path} holds a mixture of experts, which is not read from GGUF.", cure=ORIGINAL)
    embedding = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no token embeddings (`token_embd.weight`).", cure=ORIGINAL)
    heads, hidden = _size(file, "attention.head_count"), _size(file, "embedding_length")
    head_dim = file.metadata.get(f"{family}.attention.key_length") or hidden // heads
    return Shape(
        blocks=_size(file, "block_count"),
        hidden=hidden,
        inner=_size(file, "feed_forward_length"),
        heads=heads,
        key_heads=_size(file, "attention.head_count_kv", heads),
        head_dim=int(head_dim),
        vocabulary=embedding.shape[0],
    )


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _meta(file, key, default)
    if type(value) is not int or value <= 0 or value > 1 << 24:
        raise ModelError(
            f"{file.path} gives `{key}` as {str(value)[:60]}, not one whole number above 0.", cure=ORIGINAL
        )
    return value


def _tensor_names(file: GgufFile, shape: Shape) -> dict[str, GgufTensor]:
    """transformers' name of each tensor; the count is checked against the blocks."""
    names: dict[str, GgufTensor] = {}
    unknown: list[str] = []
    for tensor in file.tensors:
        name = _transformers_name(tensor.name)
        if name is not None:
            names[name] = tensor
        elif tensor.name != _ROPE_FACTORS:
            unknown.append(tensor.name)
    expected = _expected_shapes(file, shape, names)
    missing = [name for name in expected if name not in names]
    unknown += [name for name in names if name not in expected]
    if missing or unknown:
        raise ModelError(
            f"{file.path} lacks {len(missing)} tensors and has {len(unknown)} that are not known for its family"
            f" (such as {(missing + unknown)[0][:80]}).",
            cure=ORIGINAL,
        )
    for name, sizes in expected.items():
        if names[name].shape != sizes:
            raise ModelError(
                f"{file.path} has tensor '{names[name].name}' of shape {list(names[name].shape)},"
                f" expected {list(sizes)}.",
                cure="Download the file again.",
            )
    return names


def _transformers_name(name: str) -> str | None:
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _IN_BLOCK:
        return f"model.layers.{int(parts[1])}.{_IN_BLOCK[parts[2]]}.{suffix}"
    return None


def _expected_shapes(file: GgufFile, shape: Shape, names: Mapping[str, GgufTensor]) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    matrices = {
        "attn_q": (queries, shape.hidden), "attn_k": (keys, shape.hidden), "attn_v": (keys, shape.hidden),
        "attn_output": (shape.hidden, queries), "ffn_gate": (shape.inner, shape.hidden),
        "ffn_up": (shape.inner, shape.hidden), "ffn_down": (shape.hidden, shape.inner),
        "attn_norm": (shape.hidden,), "ffn_norm": (shape.hidden,),
    }  # fmt: skip
    family = file.metadata["general.architecture"]
    if family == "qwen3":
        matrices |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
    biased: tuple[str, ...] = ("attn_q", "attn_k", "attn_v") if family == "qwen2" else ()
    if family != "qwen2" and _has_attention_bias(names):
        biased = ("attn_q", "attn_k", "attn_v", "attn_output")
    expected = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden), "model.norm.weight": (shape.hidden,)}
    for block in range(shape.blocks):
        prefix = f"model.layers.{block}"
        expected |= {f"{prefix}.{_IN_BLOCK[part]}.weight": sizes for part, sizes in matrices.items()}
        expected |= {f"{prefix}.{_IN_BLOCK[part]}.bias": matrices[part][:1] for part in biased}
    if "lm_head.weight" in names:
        expected["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return expected


def _has_attention_bias(names: Mapping[str, GgufTensor]) -> bool:
    return "model.layers.0.self_attn.q_proj.bias" in names


def _choose_dtype(file: GgufFile) -> StoredType:
    elements = sum(tensor.elements for tensor in file.tensors)
    matrices = [tensor.type_code for tensor in file.tensors if len(tensor.shape) > 1]
    halves = all(code == GGMLQuantizationType.BF16 for code in matrices)
    return "bfloat16" if halves or elements * 4 > FULL_PRECISION_LIMIT_BYTES else "float32"


def _config(file: GgufFile, shape: Shape, names: Mapping[str, GgufTensor], dtype: StoredType) -> dict[str, Any]:
    family = file.metadata["general.architecture"]
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _size(file, "context_length"),
        "rms_norm_eps": _short(_meta(file, "attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "rope_parameters": _rope(file, shape),
        "dtype": dtype,
    }
    if family != "qwen2":
        config["attention_bias"] = _has_attention_bias(names)
    if family == "llama":
        config["mlp_bias"] = False
    else:
        config["use_sliding_window"] = False
    return config


def _short(value: float) -> float:
    """The shortest number with the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _rope(file: GgufFile, shape: Shape) -> dict[str, Any]:
    """transformers' rope parameters.

    Raises:
        ModelError: a scaling that cannot be told from the file.
    """
    theta = _short(_meta(file, "rope.freq_base", 10_000.0))
    family = file.metadata["general.architecture"]
    rotated = file.metadata.get(f"{family}.rope.dimension_count", shape.head_dim)
    if rotated != shape.head_dim:
        raise ModelError(f"{file.path} rotates {rotated} of {shape.head_dim} dimensions of a head.", cure=ORIGINAL)
    factors = next((tensor for tensor in file.tensors if tensor.name == _ROPE_FACTORS), None)
    if factors is not None:
        return _llama3_rope(theta, load_tensor(file, factors, ()).reshape(-1), shape, file.path)
    scaling = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _short(_meta(file, "rope.scaling.factor"))
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling == "yarn":
        original = _size(file, "rope.scaling.original_context_length")
        return {
            "rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original
        }  # fmt: skip
    raise ModelError(f"{file.path} scales its positions by '{scaling}'.", cure=ORIGINAL)


def _llama3_rope(theta: float, factors: np.ndarray, shape: Shape, path: Path) -> dict[str, Any]:
    """Llama 3.1's scaling, found again from the divisors that the file stores in its place."""
    for original in (8192, 4096, 16384, 32768):
        scaling = {"factor": _short(float(factors.max())), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if factors.shape == (shape.head_dim // 2,) and np.allclose(
            _llama3_divisors(theta, shape.head_dim, original, scaling), factors, rtol=1e-3
        ):
            return {
                "rope_type": "llama3", "rope_theta": theta, "original_max_position_embeddings": original, **scaling
            }  # fmt: skip
    raise ModelError(f"{path} scales its positions by factors that follow no rule known here.", cure=ORIGINAL)


def _llama3_divisors(theta: float, head_dim: int, original: int, scaling: Mapping[str, float]) -> np.ndarray:
    """By how much each rotation is slowed: 1 for short waves, `factor` for long ones, smooth between."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)


def _write_weights(
    file: GgufFile, folder: Path, shape: Shape, names: Mapping[str, GgufTensor], dtype: StoredType
) -> None:
    stored = "F32" if dtype == "float32" else "BF16"
    entries = {name: TensorEntry(stored, tensor.shape) for name, tensor in names.items()}
    permuted = file.metadata["general.architecture"] == "llama"

    def data() -> Iterator[tuple[str, memoryview]]:
        for name, tensor in names.items():
            values = load_tensor(file, tensor, tensor.shape)
            if permuted and ".q_proj." in name:
                values = rows_in_halves(values, shape.heads)
            elif permuted and ".k_proj." in name:
                values = rows_in_halves(values, shape.key_heads)
            kept = to_bfloat16(values) if dtype == "bfloat16" else np.ascontiguousarray(values)
            yield name, kept.reshape(-1).view(np.uint8).data

    write_safetensors(folder / SINGLE_FILE, entries, data())


def _generation_config(file: GgufFile, roles: Mapping[str, int]) -> dict[str, Any]:
    ends = [roles["eos"]] if "eos" in roles else []
    for key in ("eot", "eom"):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(index) is int and index not in ends:
            ends.append(index)
    config: dict[str, Any] = {f"{role}_token_id": roles[role] for role in ("bos", "pad") if role in roles}
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return config


def _source(file: GgufFile, path: Path) -> dict[str, Any]:
    """Where the folder came from, with a sentence for the user."""
    counts: dict[str, int] = {}
    for tensor in file.tensors:
        name = GGMLQuantizationType(tensor.type_code).name
        counts[name] = counts.get(name, 0) + tensor.elements
    main = max(counts, key=lambda name: counts[name])
    note = f"Converted from {path.name}."
    if GGMLQuantizationType[main] not in PLAIN:
        note = f"Converted from {path.name}: most weights were stored as {main}, a little worse than the original."
    return {"file": path.name, "version": FORMAT_VERSION, "elements_by_type": counts, "note": note}


def _write_card(folder: Path, metadata: Mapping[str, Any]) -> None:
    """A README.md that carries the licence on."""
    licence = metadata.get("general.license")
    if isinstance(licence, str) and licence:
        front = f"---\nlicense: {json.dumps(licence[:80])}\n---\n"
        (folder / "README.md").write_text(front, encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def source_key(path: Path) -> str:
    """Names a conversion: the head of the file (metadata and tensor table), its size and time, and the format here."""
    with GgufFile(path) as file:
        digest = hashlib.sha256(file.head_bytes())
    status = path.stat()
    digest.update(struct.pack("<qqi", status.st_size, status.st_mtime_ns, FORMAT_VERSION))
    return digest.hexdigest()[:16]
