"""Rows for `predict`: text, CSV and JSON lines in, JSON lines or CSV out. Streams, so a file may be of any size."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from trimtab.cli.output import to_json
from trimtab.errors import DataError, RunError, did_you_mean
from trimtab.text import safe

RowFormat = Literal["text", "csv", "tsv", "jsonl", "json"]
Item = str | dict[str, Any]

_FORMATS: dict[str, RowFormat] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_LONGEST_CELL = 2**31 - 1


def format_of(name: str, asked: str | None) -> RowFormat | None:
    """The format by option or ending; None when it must be told from the first line (stdin).

    Raises:
        DataError: an ending or an option that is not known.
    """
    known = ("text", "csv", "tsv", "jsonl", "json")
    if asked is not None:
        for candidate in known:
            if asked == candidate:
                return candidate
        raise DataError(f"--format {safe(asked, limit=40)} is not known.", cure=did_you_mean(asked, known))
    if name == "-":
        return None
    ending = Path(name).suffix.lower()
    if ending in _FORMATS:
        return _FORMATS[ending]
    raise DataError(
        f"{safe(name, limit=200)}: the ending '{safe(ending, limit=20)}' tells no format.",
        cure="Add --format text, csv, tsv, jsonl or json.",
    )


def output_format(target: Path | None) -> RowFormat:
    """By the ending; JSON lines for stdout.

    Raises:
        RunError: an ending for something else than what would be written.
    """
    kind = "jsonl" if target is None else _FORMATS.get(target.suffix.lower())
    if kind in ("csv", "tsv", "jsonl"):
        return kind
    raise RunError(f"{safe(str(target), limit=200)} tells no format.", cure="End it in .jsonl, .csv or .tsv.")


def is_utf8(path: Path) -> bool:
    """Whether the file can be read as UTF-8; true for what cannot be read at all."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def open_input(name: str, encoding: str = "utf-8") -> Generator[TextIO, None, None]:
    """The file as text, or stdin for `-`; a byte order mark is dropped, bytes that do not decode are named."""
    encoding = "utf-8-sig" if encoding.lower().replace("-", "") == "utf8" else encoding
    _check_encoding(encoding)
    if name == "-":
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison] - so it is where a shell closed it
            raise DataError("standard input is closed.", cure="Give a file, pipe something in, or use --text.")
        yield io.TextIOWrapper(sys.stdin.buffer, encoding=encoding, newline="") if _binary_stdin() else sys.stdin
        return
    path = Path(name)
    if path.is_dir():
        raise DataError(f"{safe(name, limit=200)} is a folder.", cure="Name one file.")
    try:
        stream = path.open(encoding=encoding, newline="")
    except FileNotFoundError:
        names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, names).split(" Known", maxsplit=1)[0] if names else ""
        cure = hint if hint.startswith("Did") else "Give a file, '-' for standard input, or --text."
        raise DataError(f"there is no file {safe(name, limit=200)}.", cure=cure) from None
    with stream:
        yield stream


def _check_encoding(name: str) -> None:
    """Raises DataError for a codec that is missing or is none for text, such as base64."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding=name)
    except LookupError:
        raise DataError(
            f"there is no text encoding '{safe(name, limit=40)}'.", cure="Try gbk, cp1252 or latin-1."
        ) from None


def _binary_stdin() -> bool:
    return isinstance(sys.stdin, io.TextIOWrapper)


def read_items(stream: TextIO, kind: RowFormat | None, name: str) -> Iterator[Item]:
    """Texts or dicts, one a row; blank lines of text and JSON lines are passed over.

    Raises:
        DataError: with `name:line` when a row cannot be read.
    """
    try:
        yield from _read_items(stream, kind, safe(name, limit=200))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{safe(name, limit=200)} is not {error.encoding}: byte {error.object[error.start]:#04x}.",
            cure="Give its encoding, for instance --encoding gbk.",
        ) from None


def _read_items(stream: TextIO, kind: RowFormat | None, name: str) -> Iterator[Item]:
    if kind in ("csv", "tsv"):
        yield from _read_csv(stream, "\t" if kind == "tsv" else ",", name)
    elif kind == "json":
        yield from _read_json(stream, name)
    else:
        for number, line in enumerate(stream, 1):
            line = line.rstrip("\r\n")
            if not line.strip():
                continue
            if kind is None:
                kind = "jsonl" if line.lstrip().startswith("{") else "text"
            yield line if kind == "text" else _row(line, f"{name}:{number}")


def _row(text: str, where: str) -> Item:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise DataError(f"not valid JSON: {reason}.", location=where, cure="One JSON object a line.") from None
    return _item(value, where)


def _item(value: Any, where: str) -> Item:
    if isinstance(value, (str, dict)):
        return value
    shown = safe(json.dumps(value), limit=60)
    raise DataError(f"{shown} is neither text nor an object.", location=where, cure='Write {"text": "..."}.')


def _read_json(stream: TextIO, name: str) -> Iterator[Item]:
    try:
        values = json.load(stream)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise DataError(f"not valid JSON: {reason}.", location=f"{name}{line}", cure="Use --format jsonl?") from None
    for number, value in enumerate(values if isinstance(values, list) else [values], 1):
        yield _item(value, f"{name}, item {number}")


def _read_csv(stream: TextIO, delimiter: str, name: str) -> Iterator[Item]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(stream, delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            raise DataError(f"{name} is empty.", cure="Its first line must name the columns.")
        _check_header(header, name)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{len(cells)} cells, but the header names {len(header)} columns.",
                    location=f"{name}:{reader.line_num}",
                    cure="Quote cells that hold the delimiter.",
                )
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(
            f"not valid CSV: {error}.", location=f"{name}:{reader.line_num}", cure="Check quotes."
        ) from None


def _check_header(header: list[str], name: str) -> None:
    twice = next((column for at, column in enumerate(header) if column in header[:at]), None)
    if twice is not None:
        raise DataError(
            f"the header names the column '{safe(twice, limit=60)}' twice.",
            location=f"{name}:1",
            cure="Rename one of the two.",
        )


# -------------------------------------------------------------------------------------------------------------- output


def merged(item: Item, prediction: dict[str, Any]) -> dict[str, Any]:
    """Input and prediction in one row; a name that both use becomes `predicted_NAME`."""
    row: dict[str, Any] = {"text": item} if isinstance(item, str) else dict(item)
    for name, value in prediction.items():
        row[f"predicted_{name}" if name in row else name] = value
    return row


@contextmanager
def open_output(target: Path | None, *, force: bool) -> Generator[TextIO, None, None]:
    """stdout, or a file that appears only when it is whole.

    Raises:
        RunError: the file exists and `force` is false, or its folder does not.
    """
    if target is None:
        yield sys.stdout
        return
    check_target(target, force=force)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as stream:
            yield stream
        partial.replace(target)
    except OSError as error:
        if error.filename not in (None, str(partial)):
            raise
        raise RunError(
            f"{safe(str(target), limit=200)} cannot be written: {error.strerror or error}.",
            cure="Free some space there, or choose another place with --output.",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def check_target(target: Path, *, force: bool) -> None:
    """Refuse a file that would be written over, before any work is done."""
    shown = safe(str(target), limit=200)
    if target.is_dir():
        raise RunError(f"{shown} is a folder.", cure="Name a file.")
    if target.exists() and not force:
        raise RunError(f"{shown} exists.", cure="Take another name, or add --force to write it over.")
    if not target.parent.is_dir():
        raise RunError(f"there is no folder {safe(str(target.parent), limit=200)}.", cure="Make it first.")


def write_rows(rows: Iterable[dict[str, Any]], stream: TextIO, *, as_csv: bool, delimiter: str = ",") -> int:
    """How many rows were written. CSV columns are those of the first row; lists and dicts become JSON in a cell."""
    count = 0
    # Every text is quoted: with bare ones, a lone carriage return would end the row for some readers.
    quoting = csv.QUOTE_NONNUMERIC
    writer = csv.writer(stream, delimiter=delimiter, lineterminator="\n", quoting=quoting) if as_csv else None
    header: list[str] = []
    for row in rows:
        if writer is None:
            stream.write(to_json(row, stream=stream) + "\n")
        else:
            if not header:
                header = list(row)
                writer.writerow([_cell(name) for name in header])
            _check_columns(row, header, count + 1)
            writer.writerow([_cell(row.get(name)) for name in header])
        count += 1
        if stream is sys.stdout:
            stream.flush()
    return count


def _check_columns(row: dict[str, Any], header: list[str], number: int) -> None:
    more = [name for name in row if name not in header]
    if more:
        raise DataError(
            f"row {number} has the column '{safe(more[0], limit=60)}', which the first row lacks.",
            cure="CSV needs the same columns in every row: write a .jsonl file instead.",
        )


def _cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula. Numbers stay numbers."""
    if isinstance(value, (list, dict, tuple)):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return f"'{value}"
    return "" if value is None else value
