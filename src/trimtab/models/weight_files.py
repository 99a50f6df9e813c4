"""The safetensors files of a model folder: checked by their headers, read without torch, written tensor by tensor.

Format: 8 bytes little-endian header length, a JSON header (`name -> dtype, shape, data_offsets`), then the tensors end
to end (https://github.com/huggingface/safetensors#format). Headers are checked against the size of the file before
anything is loaded, so a cut download is named in one line and never reaches the loader.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from trimtab.errors import ModelError
from trimtab.units import format_bytes

HEADER_LIMIT_BYTES = 100_000_000
TENSOR_LIMIT = 100_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
_TORCH_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")
_NOT_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"})
_DOWNLOAD_AGAIN = "Download the file again, or take another copy of the model."


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    """safetensors' name, such as `BF16`."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weights:
    """What the headers of a folder's weight files say."""

    files: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]

    @property
    def elements(self) -> int:
        """Numbers stored; a tied head counts once, since it is stored once."""
        return sum(entry.elements for entry in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        return sum(entry.elements * DTYPE_BITS[entry.dtype] for entry in self.tensors.values()) // 8

    @property
    def dtype(self) -> str:
        """torch's name of the type that most of the numbers have."""
        counts: Counter[str] = Counter()
        for entry in self.tensors.values():
            counts[entry.dtype] += entry.elements
        name = counts.most_common(1)[0][0] if counts else "F32"
        return _TORCH_NAMES.get(name, name.lower())


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The checked header of one safetensors file.

    Raises:
        ModelError: empty, cut or malformed; names the file with the bytes expected and found.
    """
    found = path.stat().st_size
    if found < 8:
        raise ModelError(f"{path} holds {found} bytes, a weight file at least 8.", cure=_DOWNLOAD_AGAIN)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > HEADER_LIMIT_BYTES:
            raise ModelError(
                f"{path} is not a safetensors file: its header would take {format_bytes(length)}"
                f" (limit {format_bytes(HEADER_LIMIT_BYTES)}).",
                cure=_pointer_cure(path),
            )
        if 8 + length > found:
            raise ModelError(
                f"{path} is cut off: the header alone takes {8 + length:,} bytes, the file has {found:,}.",
                cure=_DOWNLOAD_AGAIN,
            )
        raw = file.read(length)
    entries, data_bytes = _parse_header(path, raw)
    expected = 8 + length + data_bytes
    if expected != found:
        state = "is cut off" if expected > found else "has bytes that no tensor owns"
        raise ModelError(f"{path} {state}: expected {expected:,} bytes, found {found:,}.", cure=_DOWNLOAD_AGAIN)
    return entries


def _pointer_cure(path: Path) -> str:
    """Git LFS leaves a small text in the place of a file that was not fetched."""
    with path.open("rb") as file:
        is_pointer = file.read(40).startswith(b"version https://git-lfs")
    return "It is a Git LFS pointer: run `git lfs pull` in that folder." if is_pointer else _DOWNLOAD_AGAIN


def _parse_header(path: Path, raw: bytes) -> tuple[dict[str, TensorEntry], int]:
    """Entries by name, and the bytes of data that they cover without gap or overlap."""
    try:
        header = json.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ModelError(f"{path} has a header that is not JSON.", cure=_DOWNLOAD_AGAIN) from None
    if not isinstance(header, dict) or len(header) > TENSOR_LIMIT:
        raise ModelError(
            f"{path} has a header that is no table of at most {TENSOR_LIMIT:,} tensors.", cure=_DOWNLOAD_AGAIN
        )
    entries: dict[str, TensorEntry] = {}
    spans: list[tuple[int, int]] = []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        entry, span = _parse_entry(path, name, fields)
        entries[name] = entry
        spans.append(span)
    end = 0
    for begin, finish in sorted(spans):
        if begin != end:
            raise ModelError(f"{path} has tensors that overlap or leave a gap at byte {end:,}.", cure=_DOWNLOAD_AGAIN)
        end = finish
    return entries, end


def _parse_entry(path: Path, name: str, fields: Any) -> tuple[TensorEntry, tuple[int, int]]:
    shape = fields.get("shape") if isinstance(fields, dict) else None
    offsets = fields.get("data_offsets") if isinstance(fields, dict) else None
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{path} describes tensor '{name[:80]}' without shape or place.", cure=_DOWNLOAD_AGAIN)
    assert isinstance(fields, dict)
    dtype = fields.get("dtype")
    if dtype not in DTYPE_BITS:
        raise ModelError(
            f"{path} stores tensor '{name[:80]}' as '{str(dtype)[:20]}', a type that is not known here.",
            cure="Take a copy of the model in float32, bfloat16 or float16.",
        )
    entry = TensorEntry(dtype=str(dtype), shape=tuple(shape))
    begin, end = offsets
    if (end - begin) * 8 != entry.elements * DTYPE_BITS[entry.dtype]:
        raise ModelError(
            f"{path} gives tensor '{name[:80]}' {end - begin:,} bytes; its shape {list(entry.shape)} in {dtype} does"
            " not take that many.",
            cure=_DOWNLOAD_AGAIN,
        )
    return entry, (begin, end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def check_weights(folder: Path) -> Weights:
    """Every weight file of `folder`, checked.

    Raises:
        ModelError: no weights; pickled weights only; an index that names a file which is not there; a bad file.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    elif index.is_file():
        files = _files_of_index(index)
    else:
        raise _no_weights(folder)
    tensors: dict[str, TensorEntry] = {}
    for path in files:
        tensors.update(read_header(path))
    if not tensors:
        raise ModelError(f"{files[0]} holds no tensor.", cure=_DOWNLOAD_AGAIN)
    return Weights(files=tuple(files), tensors=tensors)


def _files_of_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} is not an index with a `weight_map`.", cure=_DOWNLOAD_AGAIN) from None
    for name in names:
        if Path(name).name != name or "\\" in name:
            raise ModelError(f"{index} names '{name[:80]}', which lies outside the folder.", cure=_DOWNLOAD_AGAIN)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing or not names:
        raise ModelError(
            f"{index} names {len(names)} weight files, of which {len(missing)} are missing: {', '.join(missing[:3])}.",
            cure="Download the missing files into that folder.",
        )
    return [index.parent / name for name in names]


def _no_weights(folder: Path) -> ModelError:
    pickled = sorted(
        path.name for pattern in _PICKLES for path in folder.glob(pattern) if path.name not in _NOT_WEIGHTS
    )
    if pickled:
        return ModelError(
            f"{folder} has its weights only as {pickled[0]}; reading pickles can run code, so they are refused.",
            cure="Take the model.safetensors of the model, or convert it once where you trust the file:"
            " python -c \"from transformers import AutoModel; AutoModel.from_pretrained('IN').save_pretrained('OUT')\"",
        )
    if (folder / "adapter_config.json").is_file():
        return ModelError(
            f"{folder} holds an adapter, not a model.", cure="Give the base model's folder as `model.path`."
        )
    return ModelError(
        f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there.",
        cure="Download the weights into that folder.",
    )


def write_safetensors(path: Path, entries: Mapping[str, TensorEntry], data: Iterable[tuple[str, memoryview]]) -> None:
    """Writes one file, tensor by tensor in the order of `entries`, so that memory never holds the whole model.

    `data` gives the name and the contiguous bytes of each tensor in that same order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        size = entry.elements * DTYPE_BITS[entry.dtype] // 8
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header, ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)  # the data then starts on 8 bytes, as readers that map the file like it
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)))
        file.write(raw)
        for (name, entry), (given, content) in zip(entries.items(), data, strict=True):
            size = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
            assert given == name and content.nbytes == size, f"{given} of {content.nbytes} bytes for {name} {entry}"
            file.write(content)
