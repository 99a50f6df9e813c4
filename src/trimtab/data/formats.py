"""Files of any usual format as rows of one memory-mapped table, each with the file and line it came from.

Loads no torch. Text formats are read as a stream and written once to an Arrow file in the cache, named by the hash of
contents and options; Parquet and Arrow go the same way, so that everything after this module sees one kind of table.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trimtab.data import rowstore, tablefile
from trimtab.data.csvfile import MOST_COLUMNS, read_csv
from trimtab.data.jsonfile import JsonRow, read_json
from trimtab.data.plaintext import read_plain
from trimtab.data.problems import Problems, TooManyProblemsError
from trimtab.data.rowstore import BLOCK_ROWS, FILE_COLUMN, PLACE_COLUMN, Store, StoreWriter
from trimtab.data.sourcefiles import SourceFile, resolve
from trimtab.data.textfile import Budget, TextSource, check_encoding
from trimtab.errors import DataError
from trimtab.text import safe
from trimtab.units import GIB

Progress = Callable[[int, int], None]
_VERSION = "1"
"""Part of the cache's key: raise it when the same file would give other rows."""
_BUDGET_BYTES = 50 * GIB
_BLOCK_CHARACTERS = 8_000_000
_TABLE_FAMILIES = ("parquet", "arrow")


@dataclass(frozen=True)
class Rows:
    """All rows of the files, memory-mapped. Text formats know the line of each row, table formats its number."""

    files: tuple[str, ...]
    digest: str
    """sha256 of the contents and the options; names do not count."""
    stored: pa.Table = field(repr=False)
    """The user's columns and two of our own."""
    row_files: tuple[bool, ...] = field(default=(), repr=False)
    """For each file, whether places are row numbers and not lines."""
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Names of integer labels by id, where the files carry them (written by `datasets`)."""

    @cached_property
    def table(self) -> pa.Table:
        """The user's columns. A column with `rowstore.is_json(field)` holds values of several types as JSON text."""
        return self.stored.select(list(self.columns))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in self.stored.schema.names if name not in (FILE_COLUMN, PLACE_COLUMN))

    def __len__(self) -> int:
        return self.stored.num_rows

    def location(self, row: int) -> str:
        """`train.csv:17` (the line where the row begins), or `train.parquet:row 17`."""
        number = self.stored.column(FILE_COLUMN)[row].as_py()
        place = self.stored.column(PLACE_COLUMN)[row].as_py()
        return f"{self.files[number]}:row {place}" if self.row_files[number] else f"{self.files[number]}:{place}"

    def read(self, columns: Sequence[str], start: int, stop: int) -> dict[str, list[Any]]:
        """Rows [start, stop) of some columns as Python values."""
        part = self.stored.select(list(columns)).slice(start, stop - start)
        return _decode(part)

    def pick(self, columns: Sequence[str], indices: NDArray[np.int64]) -> dict[str, list[Any]]:
        """Rows by number. Rising numbers are read in blocks, so a pass over the data needs little memory."""
        table = self.stored.select(list(columns))
        result: dict[str, list[Any]] = {name: [] for name in columns}
        for low, local in _runs(indices):
            part = table.slice(low, int(local[-1]) + 1)
            if len(local) != part.num_rows:
                part = part.take(pa.array(local))
            for name, values in _decode(part).items():
                result[name].extend(values)
        return result


def _decode(part: pa.Table) -> dict[str, list[Any]]:
    return {one.name: rowstore.decoded(one, part.column(i)) for i, one in enumerate(part.schema)}


def _runs(indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Cuts row numbers into rising runs inside one block: (first, numbers counted from the first)."""
    at = 0
    while at < len(indices):
        low = int(indices[at])
        ahead = indices[at : at + BLOCK_ROWS]
        good = (np.diff(ahead, prepend=low - 1) > 0) & (ahead < low + BLOCK_ROWS)
        length = len(ahead) if good.all() else int(np.argmin(good))
        yield low, ahead[:length] - low
        at += length


def read_rows(
    sources: Sequence[str],
    *,
    encoding: str = "utf-8",
    cache_dir: Path,
    on_progress: Progress | None = None,
    budget_bytes: int | None = None,
) -> Rows:
    """Reads files, folders and hub data sets as one table; the second time it comes from `cache_dir`.

    CSV and TSV cells stay text. JSON keeps its types; keys that a row lacks are null. Columns of several files are
    united by name. `.txt` gives paragraphs or lines, see `plaintext.read_plain`; folders of texts by class are not
    read as labels. `.gz` is accepted for text formats. `on_progress(done, total)` counts in bytes of the files, read
    twice (hash, then rows). `budget_bytes`: most bytes that all files may unpack to; left out: 50 GiB, or the free
    space of the cache disk when that is less.

    Raises:
        DataError: every fault of the files, with line, cause and cure; nothing is left in the cache then.
    """
    check_encoding(encoding)
    files = resolve(sources)
    progress = _Progress(on_progress, 2 * sum(file.path.stat().st_size for file in files))
    digest = _digest(files, encoding, progress)
    store = Store(cache_dir, digest[:32])
    opened = store.open()
    if opened is None:
        try:
            _fill(store, files, encoding, _budget(cache_dir, budget_bytes), progress)
        except OSError as error:
            raise _failed(error, cache_dir) from None
        opened = store.open()
    if opened is None:
        raise _failed(OSError("what was written cannot be read back"), cache_dir)
    progress.finish()
    table, about = opened
    names = {str(column): tuple(names) for column, names in about["class_names"].items()}
    by_row = tuple(file.family in _TABLE_FAMILIES for file in files)
    return Rows(tuple(file.name for file in files), digest, table, by_row, names)


def _failed(error: OSError, cache_dir: Path) -> DataError:
    reason = safe(error.strerror or str(error), limit=160)
    return DataError(
        f"reading the data into the cache {safe(str(cache_dir), limit=200)} failed: {reason}.",
        cure="Free space there, or make the folder writable.",
    )


class _Progress:
    """Adds up bytes and passes them on; never more than the total."""

    def __init__(self, callback: Progress | None, total: int) -> None:
        self._callback = callback
        self._total = total
        self._done = 0

    def add(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        if self._callback is not None:
            self._callback(self._done, self._total)

    def finish(self) -> None:
        self.add(self._total)


def _digest(files: Sequence[SourceFile], encoding: str, progress: _Progress) -> str:
    whole = hashlib.sha256(f"rows {_VERSION}".encode())
    for file in files:
        content = hashlib.sha256()
        with file.path.open("rb") as stream:
            while block := stream.read(1 << 20):
                content.update(block)
                progress.add(len(block))
        options = [file.family, str(file.gzipped), encoding if file.is_text else ""]
        # A .jsonl file names each broken line, a .json file may be one value: the ending is an option too.
        options.append(file.name.lower().removesuffix(".gz").rsplit(".", 1)[-1] if file.family == "json" else "")
        whole.update("\0".join([*options, content.hexdigest(), ""]).encode())
    return whole.hexdigest()


def _budget(cache_dir: Path, asked_bytes: int | None) -> Budget:
    if asked_bytes is not None:
        return Budget(asked_bytes)
    there = next(folder for folder in (cache_dir, *cache_dir.absolute().parents) if folder.is_dir())
    return Budget(min(_BUDGET_BYTES, shutil.disk_usage(there).free))


def _fill(store: Store, files: Sequence[SourceFile], encoding: str, budget: Budget, progress: _Progress) -> None:
    folder = store.begin()
    writer = StoreWriter(folder)
    problems = Problems()
    try:
        counts = _write_files(writer, files, encoding, budget, progress, problems)
        problems.raise_if_any()
        path = writer.finish()
        names = _class_names(files)
        store.commit(path.parent, {"rows": sum(counts), "class_names": names})
    finally:
        writer.abort()
        shutil.rmtree(folder, ignore_errors=True)


def _class_names(files: Sequence[SourceFile]) -> dict[str, tuple[str, ...]]:
    """What all table files agree on."""
    each = [tablefile.class_names(file.path, file.family) for file in files if file.family in _TABLE_FAMILIES]
    if len(each) != len(files):
        return {}
    return {column: names for column, names in each[0].items() if all(one.get(column) == names for one in each)}


def _write_files(
    writer: StoreWriter,
    files: Sequence[SourceFile],
    encoding: str,
    budget: Budget,
    progress: _Progress,
    problems: Problems,
) -> list[int]:
    """Rows written of each file; faults are gathered over all files."""
    counts: list[int] = []
    for number, file in enumerate(files):
        before = problems.count
        stamp = _stamp(file)
        reader = _FileReader(writer, file, number, encoding, budget, progress, problems)
        try:
            try:
                reader.run()
            except DataError as error:
                problems.add(error.location or file.name, error.message, error.cure)
            if problems.count == before and reader.rows == 0:
                problems.add(file.name, _no_rows(file), "Give a file with rows.")
            if _stamp(file) != stamp:
                problems.add(file.name, "the file changed while it was read.", "Run again when it is complete.")
        except TooManyProblemsError:
            break
        counts.append(reader.rows)
    return counts


def _stamp(file: SourceFile) -> tuple[int, int]:
    status = file.path.stat()
    return status.st_size, status.st_mtime_ns


def _no_rows(file: SourceFile) -> str:
    return "the file has a header but no rows." if file.family in ("csv", "tsv") else "the file has no rows."


class _FileReader:
    """Reads one file and writes its rows in blocks."""

    def __init__(
        self,
        writer: StoreWriter,
        file: SourceFile,
        number: int,
        encoding: str,
        budget: Budget,
        progress: _Progress,
        problems: Problems,
    ) -> None:
        self.rows = 0
        self._writer = writer
        self._file = file
        self._number = number
        self._budget = budget
        self._problems = problems
        self._source = TextSource(file.path, file.name, file.gzipped, encoding, budget, progress.add)

    def run(self) -> None:
        readers = {
            "csv": lambda: self._csv(","),
            "tsv": lambda: self._csv("\t"),
            "json": self._json,
            "text": self._plain,
            "parquet": lambda: self._batches(tablefile.read_parquet),
            "arrow": lambda: self._batches(tablefile.read_arrow),
        }
        readers[self._file.family]()

    def _csv(self, delimiter: str) -> None:
        table = read_csv(self._source, delimiter, self._problems)
        if table is None:
            return
        fields = [pa.field(name, pa.string()) for name in table.columns]
        for block in _blocks((row.line, row.cells, sum(map(len, row.cells))) for row in table.rows):
            columns = [pa.array(cells, pa.string()) for cells in zip(*(cells for _, cells in block), strict=True)]
            self._add(fields, columns, [line for line, _ in block])

    def _plain(self) -> None:
        rows = read_plain(self._source, self._problems)
        fields = [pa.field("text", pa.string())]
        for block in _blocks((row.line, row.text, len(row.text)) for row in rows):
            self._add(fields, [pa.array([text for _, text in block], pa.string())], [line for line, _ in block])

    def _json(self) -> None:
        rows = read_json(self._source, self._problems)
        for block in _blocks((row.line, row, row.characters) for row in rows):
            self._json_block([row for _, row in block])

    def _json_block(self, block: list[JsonRow]) -> None:
        names = list(dict.fromkeys(name for row in block for name in row.values))
        if len(names) > MOST_COLUMNS or len({*self._writer.columns, *names}) > MOST_COLUMNS:
            raise DataError(
                f"the rows have more than {MOST_COLUMNS:,} different keys.",
                cure="Keep what varies from row to row as values, not as keys.",
                location=self._source.at(block[0].line),
            )
        try:
            columns = [rowstore.to_column(name, [row.values.get(name) for row in block]) for name in names]
        except UnicodeEncodeError:
            self._json_block([row for row in block if self._is_text(row)])
            return
        if block:
            self._add([one for one, _ in columns], [array for _, array in columns], [row.line for row in block])

    def _is_text(self, row: JsonRow) -> bool:
        """Whether every text of the row is valid; JSON escapes can write half a character."""
        try:
            _encode_all(row.values)
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            self._problems.add(
                self._source.at(row.line),
                f"a text holds half of a surrogate pair (\\u{code:04x}), which is no character.",
                "Write the whole character, or remove the escape.",
            )
            return False
        return True

    def _batches(self, read: Callable[[Path, str, Budget, Problems], Iterator[pa.RecordBatch]]) -> None:
        for batch in read(self._file.path, self._file.name, self._budget, self._problems):
            places = range(self.rows + 1, self.rows + batch.num_rows + 1)
            self._add(list(batch.schema), batch.columns, places)

    def _add(self, fields: Sequence[pa.Field], columns: Sequence[Any], places: Sequence[int]) -> None:
        kept = [index for index, one in enumerate(fields) if one.name not in (FILE_COLUMN, PLACE_COLUMN)]
        self._writer.add([fields[i] for i in kept], [columns[i] for i in kept], self._number, places)
        self.rows += len(places)


def _encode_all(value: Any) -> None:
    """Raises UnicodeEncodeError at the first text that UTF-8 cannot hold."""
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, dict):
        for key, inner in value.items():
            key.encode("utf-8")
            _encode_all(inner)
    elif isinstance(value, list):
        for inner in value:
            _encode_all(inner)


def _blocks(rows: Iterator[tuple[int, Any, int]]) -> Iterator[list[tuple[int, Any]]]:
    """Gathers (line, row, characters) into blocks small enough for memory."""
    block: list[tuple[int, Any]] = []
    characters = 0
    for line, row, size in rows:
        block.append((line, row))
        characters += size
        if len(block) >= BLOCK_ROWS // 2 or characters >= _BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block
