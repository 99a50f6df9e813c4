"""Plain text files as rows, for language modelling. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trimtab.data.problems import Problems
from trimtab.data.textfile import LONGEST_TEXT_BYTES, TextSource
from trimtab.units import format_bytes

_LINES_PER_BLANK = 20


class TextRow(NamedTuple):
    """One text and the line, from 1, where it begins."""

    line: int
    text: str


def read_plain(source: TextSource, problems: Problems) -> Iterator[TextRow]:
    """The rows of a `.txt` file.

    A file in paragraphs (text parted by blank lines, at least one blank line to 20 lines of text) gives one row per
    paragraph, with its line breaks. Any other file gives one row per line, since short lines without blank ones
    between them are usually examples of their own.

    Raises:
        DataError: the file cannot be decoded.
    """
    rows = _paragraphs(source) if _has_paragraphs(source.aside()) else _lines(source)
    limit = format_bytes(LONGEST_TEXT_BYTES)
    for row in rows:
        if len(row.text) * 4 > LONGEST_TEXT_BYTES and len(row.text.encode("utf-8", "replace")) > LONGEST_TEXT_BYTES:
            problems.add(
                source.at(row.line),
                f"a single text longer than {limit}, the limit for one text.",
                f"Part it by blank lines into texts of at most {limit}.",
            )
        else:
            yield row


def _has_paragraphs(source: TextSource) -> bool:
    filled = breaks = 0
    previous_blank = True
    for line in source.lines():
        blank = not line.strip()
        if not blank:
            breaks += previous_blank and filled > 0
            filled += 1
        previous_blank = blank
    return breaks * _LINES_PER_BLANK >= filled and breaks > 0


def _lines(source: TextSource) -> Iterator[TextRow]:
    for number, line in enumerate(source.lines(), start=1):
        if line.strip():
            yield TextRow(number, line.rstrip("\r\n"))


def _paragraphs(source: TextSource) -> Iterator[TextRow]:
    begin = 1
    held: list[str] = []
    held_characters = 0
    for number, line in enumerate(source.lines(), start=1):
        if line.strip():
            begin = begin if held else number
            # Above the limit the text is refused anyway; what follows need not fill the memory.
            if held_characters <= LONGEST_TEXT_BYTES:
                held.append(line.rstrip("\r\n"))
                held_characters += len(line)
        elif held:
            yield TextRow(begin, "\n".join(held))
            held, held_characters = [], 0
    if held:
        yield TextRow(begin, "\n".join(held))
