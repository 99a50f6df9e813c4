"""Parquet, Arrow and Feather files, and folders saved by `datasets`: small record batches within a budget.

Loads no torch. Nothing in these files is trusted: sizes are counted as they unpack, and every batch is validated, since
a crafted offset would otherwise be read outside the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trimtab.data.csvfile import MOST_COLUMNS
from trimtab.data.problems import Problems
from trimtab.data.textfile import LONGEST_TEXT_BYTES, Budget
from trimtab.errors import DataError
from trimtab.text import safe
from trimtab.units import format_bytes

_BATCH_ROWS = 1024
_ROW_OVERHEAD_BYTES = 16
ClassNames = dict[str, tuple[str, ...]]


def read_parquet(path: Path, name: str, budget: Budget, problems: Problems) -> Iterator[pa.RecordBatch]:
    """Batches of at most 1024 rows. A fault is a problem and ends the file."""
    try:
        with pq.ParquetFile(path) as file:
            _check_width(file.schema_arrow, name)
            declared = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            Budget(budget.limit_bytes - budget.used_bytes).take(declared, name)
            yield from _checked(file.iter_batches(batch_size=_BATCH_ROWS), name, budget, problems)
    except (pa.ArrowException, OSError) as error:
        problems.add(name, *_damaged("Parquet", error))


def read_arrow(path: Path, name: str, budget: Budget, problems: Problems) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow file (Feather version 2) or stream. A fault is a problem and ends the file."""
    try:
        with pa.memory_map(str(path), "r") as stream:
            batches = _open_ipc(stream)
            _check_width(batches[0], name)
            yield from _checked(batches[1], name, budget, problems)
    except (pa.ArrowException, OSError) as error:
        problems.add(name, *_damaged("Arrow", error))


def _open_ipc(stream: pa.MemoryMappedFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if stream.read(6) == b"ARROW1":
        reader = pa.ipc.open_file(stream)
        return reader.schema, (reader.get_batch(i) for i in range(reader.num_record_batches))
    stream.seek(0)
    streamed = pa.ipc.open_stream(stream)
    return streamed.schema, iter(streamed)


def _damaged(kind: str, error: Exception) -> tuple[str, str]:
    reason = safe(str(error).strip().split("\n")[0], limit=160)
    return f"not a whole {kind} file ({reason}).", "Write or download the file again."


def _check_width(schema: pa.Schema, name: str) -> None:
    names = list(schema.names)
    if len(names) > MOST_COLUMNS:
        raise DataError(
            f"{len(names):,} columns; at most {MOST_COLUMNS:,} are read.", cure="Drop columns.", location=name
        )
    twice = next((one for index, one in enumerate(names) if one in names[:index]), None)
    if twice is not None:
        raise DataError(
            f"the column '{safe(twice, limit=60)}' occurs twice.", cure="Rename or remove one.", location=name
        )


def _checked(
    batches: Iterator[pa.RecordBatch], name: str, budget: Budget, problems: Problems
) -> Iterator[pa.RecordBatch]:
    row = 0
    for large in batches:
        large.validate(full=True)
        for start in range(0, large.num_rows, _BATCH_ROWS):
            batch = large.slice(start, _BATCH_ROWS)
            budget.take(batch.nbytes + _ROW_OVERHEAD_BYTES * batch.num_rows, name)
            _check_lengths(batch, name, row, problems)
            yield plain_batch(batch)
            row += batch.num_rows


def _check_lengths(batch: pa.RecordBatch, name: str, first_row: int, problems: Problems) -> None:
    if batch.nbytes <= LONGEST_TEXT_BYTES:
        return
    limit = format_bytes(LONGEST_TEXT_BYTES)
    for column_name, column in zip(batch.schema.names, batch.columns, strict=True):
        if _longest_text(column) <= LONGEST_TEXT_BYTES:
            continue
        bad = next(i for i in range(len(column)) if _longest_text(column.slice(i, 1)) > LONGEST_TEXT_BYTES)
        problems.add(
            f"{name}:row {first_row + bad + 1}",
            f"column '{safe(column_name, limit=60)}' has a single text longer than {limit}, the limit for one text.",
            f"Cut it into rows of at most {limit}.",
        )


def _longest_text(array: pa.Array) -> int:
    """Bytes of the longest text anywhere in the array."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        lengths = pc.call_function("binary_length", [array.cast(pa.large_string())])
        return pc.call_function("max", [lengths]).as_py() or 0
    if pa.types.is_dictionary(kind):
        return _longest_text(array.dictionary)
    if _is_list(kind):
        return _longest_text(array.flatten())
    if pa.types.is_struct(kind):
        return max((_longest_text(part) for part in array.flatten()), default=0)
    return 0


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The same values in the few types that the rest of Trimtab knows: no dictionaries, views or large variants."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if _is_list(kind):
        return pa.list_(plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(part.name, plain_type(part.type)) for part in kind])
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    return kind


def plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch in plain types, without metadata."""
    columns = [_plain_array(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _plain_array(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    wanted = plain_type(array.type)
    return array if array.type == wanted else array.cast(wanted)


def class_names(path: Path, kind: str) -> ClassNames:
    """Names that the library `datasets` wrote beside integer labels: column -> names by id. Empty on any doubt."""
    try:
        if kind == "parquet":
            metadata = pq.read_schema(path).metadata
        else:
            with pa.memory_map(str(path), "r") as stream:
                metadata = _open_ipc(stream)[0].metadata
    except (pa.ArrowException, OSError):
        return {}
    text = (metadata or {}).get(b"huggingface")
    return names_from_features(text) if text else {}


def names_from_features(text: bytes) -> ClassNames:
    """Class names from the JSON that `datasets` keeps in a schema's metadata."""
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(features, dict):
        return {}
    found = {str(column): _names_of(feature) for column, feature in features.items()}
    return {column: names for column, names in found.items() if names}


def _names_of(feature: Any) -> tuple[str, ...]:
    for _ in range(2):  # a list of labels holds its names one level down
        if isinstance(feature, list) and feature:
            feature = feature[0]
        elif isinstance(feature, Mapping) and "names" not in feature and "feature" in feature:
            feature = feature["feature"]
    names = feature.get("names") if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel" else None
    good = isinstance(names, list) and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return tuple(names) if good and names else ()
