"""Reads the head of a GGUF file with every length checked against the file before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. A vocabulary of
150,000 tokens is read in a fraction of a second, where a reader that makes an array of each string takes seconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ENTRY_LIMIT = 100_000
ARRAY_LIMIT = 10_000_000
TEXT_LIMIT_BYTES = 16_000_000

_TEXT, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_DOWNLOAD_AGAIN = "Download the file again."


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as numpy and torch count (the file lists the fastest dimension first)."""
    type_code: int
    """Number of the ggml type, for instance 3 for Q4_1."""
    offset_bytes: int
    """From the start of the file."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """An open GGUF file: metadata, the table of tensors, and their bytes on demand. A context manager."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError when the head is no GGUF, or is cut off."""
        self.path = path
        self.size_bytes = path.stat().st_size
        if self.size_bytes < 24:
            raise ModelError(
                f"{path} holds {self.size_bytes} bytes; a GGUF file has at least 24.", cure=_DOWNLOAD_AGAIN
            )
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self.metadata, self.tensors = self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._map.close()

    def content(self, tensor: GgufTensor, size_bytes: int) -> bytes:
        """The `size_bytes` of a tensor as they are stored.

        Raises:
            ModelError: the file ends before them.
        """
        end = tensor.offset_bytes + size_bytes
        if end > self.size_bytes:
            raise ModelError(
                f"{self.path} is cut off: tensor '{tensor.name[:80]}' ends at byte {end:,}, the file has"
                f" {self.size_bytes:,}.",
                cure=_DOWNLOAD_AGAIN,
            )
        return self._map[tensor.offset_bytes : end]

    def head_bytes(self) -> bytes:
        """Everything before the data: what tells one file from another."""
        return self._map[: self._at]

    def _read_head(self) -> tuple[Mapping[str, Any], tuple[GgufTensor, ...]]:
        if self._take(4) != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'.", cure=_DOWNLOAD_AGAIN)
        version = self._number("I")
        if version not in VERSIONS:
            raise ModelError(
                f"{self.path} is GGUF version {version}; versions 2 and 3 (little-endian) are read.",
                cure="Convert it with a newer llama.cpp.",
            )
        tensor_count = self._count("Q", ENTRY_LIMIT, "tensors")
        entry_count = self._count("Q", ENTRY_LIMIT, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        tensors = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise self._malformed(f"its alignment is {alignment!r}")
        start = self._at + -self._at % alignment
        placed = [GgufTensor(t.name, t.shape, t.type_code, start + t.offset_bytes) for t in tensors]
        return metadata, tuple(placed)

    def _tensor(self) -> GgufTensor:
        name = self._text()
        dims = self._count("I", 8, "dimensions")
        sizes = tuple(self._number("Q") for _ in range(dims))
        type_code, offset = self._number("I"), self._number("Q")
        if math.prod(sizes) > 1 << 40 or offset > self.size_bytes:
            raise self._malformed(f"tensor '{name[:80]}' has sizes {sizes} at {offset:,}, beyond the file")
        return GgufTensor(name, tuple(reversed(sizes)), type_code, offset)

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._malformed(f"value type {kind} is unknown")
        value = self._number(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _array(self) -> list[Any]:
        kind = self._number("I")
        count = self._count("Q", ARRAY_LIMIT, "array elements")
        if kind == _TEXT:
            return [self._text() for _ in range(count)]
        if kind not in _SCALARS:
            raise self._malformed(f"array type {kind} is unknown")
        layout = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _text(self) -> str:
        length = self._number("Q")
        if length > TEXT_LIMIT_BYTES:
            raise self._malformed(f"a text claims {length:,} bytes")
        return self._take(length).decode("utf-8", errors="replace")

    def _count(self, kind: str, limit: int, what: str) -> int:
        count = self._number(kind)
        if count > limit:
            raise self._malformed(f"it claims {count:,} {what} (limit {limit:,})")
        return count

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0]

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > self.size_bytes:
            raise ModelError(
                f"{self.path} is cut off: its head goes beyond byte {end:,}, the file has {self.size_bytes:,}.",
                cure=_DOWNLOAD_AGAIN,
            )
        taken = self._map[self._at : end]
        self._at = end
        return taken

    def _malformed(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is malformed near byte {self._at:,}: {what}.", cure=_DOWNLOAD_AGAIN)
