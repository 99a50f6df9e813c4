"""Tokens on disk: a folder of raw arrays and a `store.json` with sizes and checksums, read as memory maps.

A store is written aside and renamed, so it is there whole or not at all. Layout (little-endian, N examples, T tokens):
`ids` int32 [T]; `types` int8 [T], `counts` uint8 [T], `tags` int32 [T] where the task has them; `lengths`,
`target_counts`, `original_lengths`, `targets_lost` int32 [N]; `rows` int64 [N]; `values` int64 [N], float64 [N] or
float32 [N, classes].
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import uuid
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.data.encoding import Encoded
from trimtab.data.task import IGNORED, LANGUAGE_KINDS, TaskSpec

FORMAT_VERSION = 1
"""Part of every store's key: raised whenever the files or the way of tokenising change."""
SHOWN_LOCATIONS = 5
"""Locations kept for each reason why examples were dropped."""

_BLOCK_BYTES = 1 << 20
_CHECKED_BLOCKS = 64
"""Blocks of a file whose checksum is compared at load: all of a file up to 64 MiB, evenly spaced ones beyond."""
_DTYPES: dict[str, str] = {
    "ids": "<i4",
    "types": "|i1",
    "counts": "|u1",
    "tags": "<i4",
    "lengths": "<i4",
    "target_counts": "<i4",
    "rows": "<i8",
    "original_lengths": "<i4",
    "targets_lost": "<i4",
}
_VALUE_DTYPES = {"classification": "<i8", "regression": "<f8", "multilabel_classification": "<f4"}


class DamagedStoreError(Exception):
    """A folder that is no whole store; it is made again."""


@dataclass(frozen=True)
class TokenDrop:
    """Examples left out for one reason."""

    reason: str
    count: int
    locations: tuple[str, ...]
    """`file:line` of the first few."""


@dataclass(frozen=True)
class TokenStats:
    """What tokenising did to the examples."""

    original_lengths: NDArray[np.int32]
    """[N] tokens of each example before the cut."""
    targets_lost: NDArray[np.int32]
    """[N] targets that the cut removed, or whose word gives no token."""
    dropped: tuple[TokenDrop, ...]
    """Examples that are not in the store."""
    max_length: int


class Tokens(NamedTuple):
    """Several examples laid end to end."""

    ids: NDArray[np.int32]
    """[tokens]"""
    lengths: NDArray[np.int32]
    """[examples]"""
    types: NDArray[np.int8] | None
    """[tokens], where the tokenizer makes segments"""


class TokenStore:
    """The tokens and targets of one data set, mapped from a folder. Raises DamagedStoreError when it is not whole."""

    def __init__(self, folder: Path, spec: TaskSpec) -> None:
        self.folder, self.spec = folder, spec
        facts = _read_facts(folder)
        self.digest: str = facts["digest"]
        columns = {name: _load_column(folder, name, entry) for name, entry in facts["columns"].items()}
        self.lengths: NDArray[np.int32] = columns["lengths"]
        self.target_counts: NDArray[np.int32] = columns["target_counts"]
        """[N] 1 for tasks on whole texts; else the targets that count, for language tasks after the shift."""
        self.rows: NDArray[np.int64] = columns["rows"]
        """[N] row of each example in `Rows`; pieces of one document share theirs."""
        drops = tuple(TokenDrop(one["reason"], one["count"], tuple(one["locations"])) for one in facts["dropped"])
        self.stats = TokenStats(columns["original_lengths"], columns["targets_lost"], drops, facts["max_length"])
        self._ids: NDArray[np.int32] = columns["ids"]
        self._types: NDArray[np.int8] | None = columns.get("types")
        self._counts: NDArray[np.uint8] | None = columns.get("counts")
        self._tags: NDArray[np.int32] | None = columns.get("tags")
        self._values: NDArray[Any] | None = columns.get("values")
        if self._values is not None and spec.kind == "multilabel_classification":
            self._values = self._values.reshape(len(self.lengths), -1)
        self._ends: NDArray[np.int64] = np.cumsum(self.lengths, dtype=np.int64)
        if len(self._ids) != int(self.lengths.sum(dtype=np.int64)):
            raise DamagedStoreError("the lengths do not add up to the tokens")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        return len(self._ids)

    def input_ids(self, index: int) -> NDArray[np.int32]:
        """[length] token ids of one example, a view of the file."""
        return self._ids[self._span(index)]

    def token_types(self, index: int) -> NDArray[np.int8] | None:
        """[length] segments of one example; None where the tokenizer makes none or the task has one text."""
        return None if self._types is None else self._types[self._span(index)]

    def labels(self, index: int) -> Any:
        """Class id (int), value (float), [classes] float32, or [length] int32 aligned with the tokens.

        Labels per token are not shifted, and IGNORED where nothing counts.
        """
        if self._values is not None:
            value = self._values[index]
            return value if value.ndim else value.item()
        span = self._span(index)
        if self._tags is not None:
            return self._tags[span]
        if self._counts is None:
            return self._ids[span]
        return np.where(self._counts[span], self._ids[span], np.int32(IGNORED))

    def label_array(self) -> NDArray[Any]:
        """All labels of a task on whole texts: [N] int64 or float64, or [N, classes] float32."""
        if self._values is None:
            raise ValueError(f"{self.spec.kind} has labels per token")
        return self._values

    def tag_counts(self, classes: int) -> NDArray[np.int64]:
        """[classes] how often each tag is a target, for token classification."""
        tags = self._tags if self._tags is not None else np.empty(0, dtype=np.int32)
        return np.bincount(tags[tags != IGNORED], minlength=classes).astype(np.int64)

    def tokens(self, indices: Sequence[int] | NDArray[np.int64]) -> Tokens:
        """The examples `indices` (at least one) laid end to end."""
        spans = [self._span(int(index)) for index in indices]
        types = None if self._types is None else np.concatenate([self._types[span] for span in spans])
        lengths = self.lengths[np.asarray(indices, dtype=np.int64)]
        return Tokens(np.concatenate([self._ids[span] for span in spans]), lengths, types)

    def _span(self, index: int) -> slice:
        end = int(self._ends[index])
        return slice(end - int(self.lengths[index]), end)


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / "store.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedStoreError(f"store.json: {error}") from error
    if not isinstance(facts, dict) or facts.pop("checksum", None) != _facts_checksum(facts):
        raise DamagedStoreError("store.json differs from its checksum")
    return facts


def _facts_checksum(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _load_column(folder: Path, name: str, entry: dict[str, Any]) -> NDArray[Any]:
    path = folder / f"{name}.bin"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                raise DamagedStoreError(f"{path.name} has {size} bytes instead of {entry['bytes']}")
            if not size:
                return np.empty(0, dtype=entry["dtype"])
            # The array keeps the map alive, and the map needs no open file.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DamagedStoreError(f"{path.name}: {error}") from error
    checksums: list[int] = entry["checksums"]
    step = max(len(checksums) // _CHECKED_BLOCKS, 1)
    view = memoryview(mapped)
    for block in [*range(0, len(checksums), step), len(checksums) - 1]:
        if zlib.crc32(view[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES]) != checksums[block]:
            raise DamagedStoreError(f"{path.name} differs from its checksum")
    return np.frombuffer(mapped, dtype=entry["dtype"])


class _Column:
    """One file that grows, with a checksum per block."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.dtype, self.size = dtype, 0
        self._checksums: list[int] = []
        self._open_checksum, self._open_bytes = 0, 0
        self._file = (folder / f"{name}.bin").open("wb")

    def append(self, values: NDArray[Any]) -> None:
        data = memoryview(values.astype(self.dtype).tobytes())
        self._file.write(data)
        self.size += len(data)
        while len(data):
            part = data[: _BLOCK_BYTES - self._open_bytes]
            self._open_checksum = zlib.crc32(part, self._open_checksum)
            self._open_bytes += len(part)
            data = data[len(part) :]
            if self._open_bytes == _BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        self._checksums.append(self._open_checksum)
        self._open_checksum, self._open_bytes = 0, 0

    def finish(self) -> dict[str, Any]:
        """Flushes to the disk; returns what `store.json` says of the file."""
        if self._open_bytes:
            self._close_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"dtype": self.dtype, "bytes": self.size, "checksums": self._checksums}

    def close(self) -> None:
        self._file.close()


@dataclass
class _Dropping:
    count: int = 0
    locations: list[str] = field(default_factory=list[str])


class StoreWriter:
    """Takes encoded examples in order and makes a store of them. Close it whatever happens."""

    def __init__(self, folder: Path, spec: TaskSpec, *, types: bool, counts: bool) -> None:
        self._target, self._spec = folder, spec
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._aside = folder.with_name(f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        self._aside.mkdir()
        names = ["ids", "lengths", "target_counts", "rows", "original_lengths", "targets_lost"]
        names += ["types"] * types + ["counts"] * counts + ["tags"] * (spec.kind == "token_classification")
        dtypes = {name: _DTYPES[name] for name in names}
        if spec.kind in _VALUE_DTYPES:
            dtypes["values"] = _VALUE_DTYPES[spec.kind]
        self._columns = {name: _Column(self._aside, name, dtype) for name, dtype in dtypes.items()}
        self._dropped: dict[str, _Dropping] = {}
        self.kept = 0

    def add(self, examples: Sequence[Encoded], targets: Iterable[Any], location: Any) -> None:
        """Appends the examples that can be trained on; `targets` are their class ids, values or rows of 0/1.

        `location(row)` is the `file:line` of a row.
        """
        kept: list[Encoded] = []
        values: list[Any] = []
        for one, target in zip(examples, targets, strict=True):
            if one.reason:
                self._drop(one, location)
            else:
                kept.append(one)
                values.append(target)
        if not kept:
            return
        self.kept += len(kept)
        self._append_tokens(kept)
        if "values" in self._columns:
            self._columns["values"].append(np.array(values, dtype=self._columns["values"].dtype))
        self._append_facts(kept)

    def _drop(self, one: Encoded, location: Any) -> None:
        drop = self._dropped.setdefault(one.reason, _Dropping())
        drop.count += 1
        if len(drop.locations) < SHOWN_LOCATIONS:
            drop.locations.append(location(one.row))

    def _append_tokens(self, kept: Sequence[Encoded]) -> None:
        ids = np.concatenate([one.ids for one in kept])
        self._columns["ids"].append(ids)
        if "types" in self._columns:
            self._columns["types"].append(np.concatenate([one.types for one in kept if one.types is not None]))
        if "counts" in self._columns or "tags" in self._columns:
            labels = np.concatenate([one.labels for one in kept if one.labels is not None])
            name = "tags" if "tags" in self._columns else "counts"
            self._columns[name].append(labels if name == "tags" else labels != IGNORED)

    def _append_facts(self, kept: Sequence[Encoded]) -> None:
        facts = {
            "lengths": array("q", (len(one.ids) for one in kept)),
            "target_counts": array("q", (one.targets for one in kept)),
            "rows": array("q", (one.row for one in kept)),
            "original_lengths": array("q", (one.original_length for one in kept)),
            "targets_lost": array("q", (one.targets_lost for one in kept)),
        }
        for name, values in facts.items():
            self._columns[name].append(np.frombuffer(values, dtype=np.int64))

    @property
    def dropped(self) -> tuple[TokenDrop, ...]:
        """What was left out so far, the most frequent reason first."""
        drops = [TokenDrop(reason, one.count, tuple(one.locations)) for reason, one in self._dropped.items()]
        return tuple(sorted(drops, key=lambda drop: -drop.count))

    def finish(self, digest: str, max_length: int) -> None:
        """Writes `store.json` and puts the store in its place; one that another process made meanwhile stays."""
        facts: dict[str, Any] = {
            "digest": digest,
            "max_length": max_length,
            "dropped": [asdict(drop) for drop in self.dropped],
            "columns": {name: column.finish() for name, column in self._columns.items()},
        }
        with (self._aside / "store.json").open("w", encoding="utf-8") as file:
            json.dump({**facts, "checksum": _facts_checksum(facts)}, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            self._aside.rename(self._target)
        except OSError:
            if not (self._target / "store.json").is_file():
                raise

    def close(self) -> None:
        """Closes the files and removes what was not put in place."""
        for column in self._columns.values():
            column.close()
        shutil.rmtree(self._aside, ignore_errors=True)


def has_counts(kind: str, *, marker: bool) -> bool:
    """Whether a store of this task says token by token what counts."""
    return kind == "instruction" or (kind in LANGUAGE_KINDS and marker)
