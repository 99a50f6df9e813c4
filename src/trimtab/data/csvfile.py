"""CSV and TSV: rows with the line where each begins, and every fault by its line. Loads no torch."""

from __future__ import annotations

import csv
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from trimtab.data.problems import Problems, TooManyProblemsError
from trimtab.data.textfile import LONGEST_TEXT_BYTES, TextSource
from trimtab.errors import DataError
from trimtab.text import safe
from trimtab.units import format_bytes

MOST_COLUMNS = 10_000
_DELIMITER_NAMES = {",": "comma", "\t": "tab", ";": "semicolon", "|": "vertical bar"}
_SNIFFED_LINES = 20


class CsvRow(NamedTuple):
    """One row and the physical line, from 1, where it begins."""

    line: int
    cells: list[str]


class CsvTable(NamedTuple):
    """The header, and the rows as an iterator that is read once."""

    columns: list[str]
    rows: Iterator[CsvRow]


@contextmanager
def _field_limit() -> Generator[None, None, None]:
    """The csv module's limit is global; ours holds while a file is read."""
    before = csv.field_size_limit(LONGEST_TEXT_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_csv(source: TextSource, delimiter: str, problems: Problems) -> CsvTable | None:
    """The table, or None when the header is not usable (a problem then says why).

    Cells stay text; blank lines are passed over. In a TSV file whose quotes are no quoting (every line has the right
    number of cells only when quotes are taken as they are), quotes are taken as they are.

    Raises:
        DataError: the file cannot be decoded or holds no rows at all.
    """
    quoting = _tsv_quoting(source) if delimiter == "\t" else csv.QUOTE_MINIMAL
    rows = _rows(source, delimiter, quoting, problems)
    header = next(rows, None)
    if header is None:
        if problems:
            return None
        raise DataError("the file is empty.", cure="Give a file with a header line and rows.", location=source.name)
    columns = [_column_name(cell, number) for number, cell in enumerate(header.cells, start=1)]
    if not _header_is_good(source, columns, header.line, delimiter, problems):
        return None
    return CsvTable(columns, _checked(source, rows, len(columns), problems))


def _column_name(cell: str, number: int) -> str:
    return cell.strip() or f"unnamed_{number}"


def _header_is_good(source: TextSource, columns: list[str], line: int, delimiter: str, problems: Problems) -> bool:
    seen: dict[str, int] = {}
    before = problems.count
    if len(columns) > MOST_COLUMNS:
        problems.add(source.at(line), f"{len(columns):,} columns; at most {MOST_COLUMNS:,} are read.", "Drop columns.")
        return False
    for number, name in enumerate(columns, start=1):
        if name in seen:
            problems.add(
                source.at(line),
                f"the header names '{safe(name, limit=60)}' twice, in columns {seen[name]} and {number}.",
                "Rename or remove one of the two.",
            )
        seen.setdefault(name, number)
    if len(columns) == 1:
        _check_delimiter(source, delimiter, problems)
    return problems.count == before


def _check_delimiter(source: TextSource, delimiter: str, problems: Problems) -> None:
    """One column only, but another delimiter in every line: the file is written with that one."""
    head = [line for line in islice(source.aside().lines(), _SNIFFED_LINES) if line.strip()]
    for other in ("\t", ";", "|", ","):
        if other != delimiter and len(head) > 1 and all(other in line for line in head):
            name, expected = _DELIMITER_NAMES[other], _DELIMITER_NAMES[delimiter]
            renamed = {"\t": "Rename the file to end in .tsv", ",": "Rename the file to end in .csv"}
            cure = renamed.get(other, f"Save the file with a {expected} between cells, as CSV (UTF-8)")
            problems.add(
                source.at(1),
                f"one column only with {expected} between cells, but there is a {name} in every line.",
                f"{cure}.",
            )
            return


def _checked(source: TextSource, rows: Iterator[CsvRow], width: int, problems: Problems) -> Iterator[CsvRow]:
    """Rows of the right width; the others become problems."""
    for row in rows:
        found = len(row.cells)
        if found == width:
            yield row
        elif not (found == 1 and not row.cells[0].strip()):
            if found > width:
                cure = 'Put text that holds the delimiter in double quotes ("...").'
            else:
                cure = "Add the missing cells, or remove the line."
            start = safe(row.cells[0], limit=40)
            problems.add(source.at(row.line), f"{_columns(found)}, {width} expected; the row begins '{start}'.", cure)


def _columns(count: int) -> str:
    return "1 column" if count == 1 else f"{count} columns"


def _rows(source: TextSource, delimiter: str, quoting: int, problems: Problems) -> Iterator[CsvRow]:
    """Every non-empty row. A quoting fault is a problem; one that runs over several lines ends the file."""
    with _field_limit():
        reader = csv.reader(source.lines(), delimiter=delimiter, quoting=quoting, strict=True)  # type: ignore[arg-type]
        while True:
            begin = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                _add_fault(source, begin, reader.line_num, str(error), problems)
                if reader.line_num > begin:
                    return
                continue
            if cells:
                yield CsvRow(begin, cells)


def _add_fault(source: TextSource, begin: int, end: int, reason: str, problems: Problems) -> None:
    limit = format_bytes(LONGEST_TEXT_BYTES)
    if "field limit" in reason and end <= begin:
        message = f"a single text longer than {limit}, the limit for one cell."
        cure = f"Cut it into rows of at most {limit}."
    elif "field limit" in reason or "end of data" in reason:
        message = f"a quote opened in the row that begins here is not closed up to line {end}."
        cure = 'Close it, or write a quote that belongs to the text as "" inside a quoted cell.'
    elif end > begin:
        message = f"a quote opened in the row that begins here ends only on line {end}, followed by other text."
        cure = 'Close it, or write a quote that belongs to the text as "" inside a quoted cell.'
    else:
        message = f"quotes are not closed as CSV wants it ({safe(reason, limit=80)})."
        cure = 'Write a quote that belongs to the text as "" inside a quoted cell.'
    problems.add(source.at(begin), message, cure)


def _tsv_quoting(source: TextSource) -> int:
    """How a TSV file uses quotes: as spreadsheets do when that reads cleanly, else not at all when that does."""
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        if _reads_cleanly(source.aside(), quoting):
            return quoting
    return csv.QUOTE_MINIMAL


def _reads_cleanly(source: TextSource, quoting: int) -> bool:
    trial = Problems()
    rows = _rows(source, "\t", quoting, trial)
    header = next(rows, None)
    if header is None:
        return not trial
    try:
        for _ in _checked(source, rows, len(header.cells), trial):
            if trial:
                return False
    except TooManyProblemsError:
        return False
    return not trial
