"""Rows written once to an Arrow file and memory-mapped from then on. Loads no torch.

Beside the user's columns the file keeps, for each row, the number of its source file and its place there. A column
whose values have no common type is kept as JSON text and marked so; readers get the values back as they were.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

FILE_COLUMN = "__trimtab_file"
PLACE_COLUMN = "__trimtab_place"
"""Line in a text file or row in a table file, both from 1."""
BLOCK_ROWS = 16_384
_BLOCK_BYTES = 32 * 1024**2
_JSON_MARK = {b"trimtab.json": b"1"}
_TABLE = "rows.arrow"
_ABOUT = "about.json"


def is_json(field: pa.Field) -> bool:
    """Whether the column holds values of several types, as JSON text."""
    return bool(field.metadata) and b"trimtab.json" in field.metadata


def _json_field(name: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata=_JSON_MARK)


def _unified_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds both, or None."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(first) and pa.types.is_list(second):
        inner = _unified_type(first.value_type, second.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return _unified_struct(first, second)
    return None


def _unified_struct(first: pa.StructType, second: pa.StructType) -> pa.DataType | None:
    parts = {part.name: part.type for part in first}
    for part in second:
        kind = _unified_type(parts[part.name], part.type) if part.name in parts else part.type
        if kind is None:
            return None
        parts[part.name] = kind
    return pa.struct(list(parts.items()))


def unify(first: pa.Field, second: pa.Field) -> pa.Field:
    """The field that holds the values of both."""
    kind = None if is_json(first) or is_json(second) else _unified_type(first.type, second.type)
    return _json_field(first.name) if kind is None else pa.field(first.name, kind)


def to_column(name: str, values: Sequence[Any]) -> tuple[pa.Field, pa.Array]:
    """Values as one Arrow column: of their common type, or as JSON text when they have none.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    try:
        array = pa.array(values, from_pandas=False)
    except UnicodeEncodeError:
        raise
    except (pa.ArrowException, OverflowError):
        return _json_field(name), _as_json(values)
    return pa.field(name, array.type), array


def _as_json(values: Sequence[Any]) -> pa.Array:
    """None stays null; anything else becomes JSON."""
    texts = [None if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in values]
    return pa.array(texts, pa.string())


def decoded(field: pa.Field, array: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of a column as Python objects."""
    values = array.to_pylist()
    if is_json(field):
        return [None if value is None else json.loads(value) for value in values]
    return values


def _widened(field: pa.Field, array: pa.Array, wanted: pa.Field) -> pa.Array:
    if field.equals(wanted, check_metadata=True):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), wanted.type)
    if field.type == pa.int64() and wanted.type == pa.float64():
        return array.cast(pa.float64(), safe=False)
    values = decoded(field, array)
    return _as_json(values) if is_json(wanted) else pa.array(values, wanted.type)


def _conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns and types of a wider schema; missing columns are null."""
    columns: list[Any] = []
    for wanted in schema:
        index = table.schema.get_field_index(wanted.name)
        if index < 0:
            columns.append(pa.nulls(table.num_rows, wanted.type))
        else:
            column = table.column(index).combine_chunks()
            columns.append(_widened(table.schema.field(index), column, wanted))
    return pa.Table.from_arrays(columns, schema=schema)


class StoreWriter:
    """Writes rows in blocks. When a later block needs a wider type, a new part begins; `finish` joins the parts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._schema = pa.schema([pa.field(FILE_COLUMN, pa.int32()), pa.field(PLACE_COLUMN, pa.int64())])
        self._parts: list[Path] = []
        self._writer: pa.RecordBatchFileWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0

    @property
    def columns(self) -> list[str]:
        return self._schema.names[2:]

    def add(self, fields: Sequence[pa.Field], arrays: Sequence[Any], file_number: int, places: Sequence[int]) -> None:
        """Rows of one file; `places` are their lines or row numbers."""
        schema = pa.schema([self._schema.field(0), self._schema.field(1), *fields])
        count = len(places)
        files = pa.repeat(pa.scalar(file_number, pa.int32()), count)
        table = pa.Table.from_arrays([files, pa.array(places, pa.int64()), *arrays], schema=schema)
        self._widen(schema)
        self._waiting.append(table)
        self._waiting_rows += count
        self._waiting_bytes += table.nbytes
        if self._waiting_rows >= BLOCK_ROWS or self._waiting_bytes >= _BLOCK_BYTES:
            self._flush()

    def _widen(self, schema: pa.Schema) -> None:
        known = {field.name: field for field in self._schema}
        for field in schema:
            known[field.name] = unify(known[field.name], field) if field.name in known else field
        wider = pa.schema(list(known.values()))
        if not wider.equals(self._schema, check_metadata=True):
            self._close_part()
            self._schema = wider

    def _flush(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            path = self._folder / f"part-{len(self._parts)}.arrow"
            self._parts.append(path)
            self._writer = pa.ipc.new_file(str(path), self._schema)
        block = pa.concat_tables([_conformed(table, self._schema) for table in self._waiting]).combine_chunks()
        self._writer.write_table(block)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def _close_part(self) -> None:
        # What waits was added under the schema as it still is.
        self._flush()
        self.abort()

    def abort(self) -> None:
        """Closes what is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def finish(self) -> Path:
        """The one file with all rows."""
        self._close_part()
        whole = self._folder / _TABLE
        if len(self._parts) == 1:
            self._parts[0].replace(whole)
            return whole
        with pa.ipc.new_file(str(whole), self._schema) as writer:
            for part in self._parts:
                for block in _blocks(part):
                    writer.write_table(_conformed(block, self._schema))
        for part in self._parts:
            part.unlink()
        return whole


def _blocks(part: Path) -> Iterator[pa.Table]:
    # Read, not mapped: a mapped file cannot be removed on Windows.
    with pa.OSFile(str(part), "rb") as stream, pa.ipc.open_file(stream) as reader:
        for index in range(reader.num_record_batches):
            yield pa.Table.from_batches([reader.get_batch(index)])


class Store:
    """A folder with the rows and a note about them; it appears whole or not at all."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        self.folder = cache_dir / f"rows-{key}"
        self._cache_dir = cache_dir

    def open(self) -> tuple[pa.Table, dict[str, Any]] | None:
        """The memory-mapped table and the note, or None when they are absent or damaged."""
        try:
            about = json.loads((self.folder / _ABOUT).read_text(encoding="utf-8"))
            stream = pa.memory_map(str(self.folder / _TABLE), "r")
            table = pa.ipc.open_file(stream).read_all()
        except (OSError, ValueError, pa.ArrowException):
            return None
        return (table, about) if table.num_rows == about.get("rows") else None

    def begin(self) -> Path:
        """A new folder beside the final one to write into."""
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".rows-", dir=self._cache_dir))

    def commit(self, written: Path, about: Mapping[str, Any]) -> None:
        """Puts the written folder in place. When another process was first, theirs stays: the content is the same."""
        (written / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
        _flush_to_disk(written / _TABLE)
        if self.folder.exists() and self.open() is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        try:
            written.rename(self.folder)
        except OSError:
            shutil.rmtree(written, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
