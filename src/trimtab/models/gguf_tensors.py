"""Tensors of a GGUF file as numpy arrays: dequantised, put in transformers' order of rows, rounded to bfloat16."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from trimtab.errors import ModelError
from trimtab.models.gguf_file import GgufFile, GgufTensor

PLAIN = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
ORIGINAL = "Give the model's original folder as `model.path`."


def load_tensor(file: GgufFile, tensor: GgufTensor, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor in float32."""
    try:
        kind = GGMLQuantizationType(tensor.type_code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelError(
            f"{file.path} stores '{tensor.name}' in the ggml type {tensor.type_code}, which is not known here.",
            cure=ORIGINAL,
        ) from None
    row = tensor.shape[-1] if tensor.shape else 1
    if row % block:
        raise ModelError(f"{file.path}: rows of {row} in '{tensor.name}' are not blocks of {block}.", cure=ORIGINAL)
    raw = file.content(tensor, tensor.elements // block * block_bytes)
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, row // block * block_bytes)
    try:
        values = dequantize(rows, kind) if kind not in PLAIN else _plain(rows, kind)
    except NotImplementedError:
        raise ModelError(
            f"{file.path} stores '{tensor.name}' as {kind.name}, which cannot be read.", cure=ORIGINAL
        ) from None
    return values.reshape(shape or tensor.shape)


def _plain(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind == GGMLQuantizationType.BF16:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16).astype(np.float32)


def rows_in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from interleaved (llama.cpp rotates neighbours) to halves (transformers rotates halves)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even, as its 16 bits. Not-a-number stays one."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values).reshape(bits.shape), 0x7FC0, rounded).astype(np.uint16)
