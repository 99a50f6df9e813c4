"""JSON and JSON lines: objects with the line where each begins, read as a stream. Loads no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trimtab.data.csvfile import MOST_COLUMNS
from trimtab.data.problems import Problems
from trimtab.data.textfile import LONGEST_LINE_CHARACTERS, LONGEST_TEXT_BYTES, TextSource
from trimtab.errors import DataError
from trimtab.text import safe
from trimtab.units import format_bytes

DEEPEST = 32
"""Levels of lists and objects inside a row; a chat has three."""
_CHAT_LISTS = ("messages", "conversations")
_BLANK = re.compile(r"[ \t\r\n]*")
_CHUNK_CHARACTERS = 1 << 18


class JsonRow(NamedTuple):
    """One object and the physical line, from 1, where it begins."""

    line: int
    values: dict[str, Any]
    characters: int
    """Length of its JSON, so that blocks of rows can be kept small."""


def read_json(source: TextSource, problems: Problems) -> Iterator[JsonRow]:
    """The rows of a `.json`, `.jsonl` or `.ndjson` file, told by content: an array of objects, one object that holds
    one list of objects, one object a line, or objects one after another.

    Raises:
        DataError: the file cannot be decoded or is empty.
    """
    kind = _kind(source)
    if kind == "lines":
        yield from _json_lines(source, problems)
    else:
        yield from _json_values(source, problems, array=kind == "array")


def _kind(source: TextSource) -> str:
    """`array`, `lines` or `values` (objects that span lines, or one object that is the whole file)."""
    first = second = None
    lines = source.aside().lines()
    try:
        first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise DataError("the file is empty.", cure="Give a file with rows.", location=source.name)
        if first.lstrip().startswith("["):
            return "array"
        second = next((line for line in lines if line.strip()), None)
    except DataError as error:
        # One line may hold a whole `{"data": [...]}` file: the stream reader has no limit for lines.
        if first is None and "longer than" in error.message:
            return _kind_of_one_line(source)
        raise
    if source.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return "lines"
    return "lines" if second is not None and _is_object(first) else "values"


def _kind_of_one_line(source: TextSource) -> str:
    head = next(source.aside().chunks(1024), "")
    return "array" if head.lstrip().startswith("[") else "values"


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(source: TextSource, problems: Problems) -> Iterator[JsonRow]:
    for number, line in enumerate(source.lines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            problems.add(
                source.at(number),
                f"broken JSON at column {error.pos + 1}: {_plain(error.msg)}, near '{_near(line, error.pos)}'.",
                'Correct the line; each line is one object, such as {"text": "...", "label": "..."}.',
            )
            continue
        except (RecursionError, ValueError) as error:
            problems.add(source.at(number), *_unreadable(error))
            continue
        row = _checked(value, number, len(line), source, problems)
        if row is not None:
            yield row


def _unreadable(error: Exception) -> tuple[str, str]:
    if isinstance(error, RecursionError):
        return f"JSON nested more than {DEEPEST} levels deep.", "Flatten the row."
    return f"JSON that cannot be read: {safe(str(error), limit=120)}.", "Write very long numbers as text."


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:]


def _near(text: str, position: int) -> str:
    return safe(text[max(position - 12, 0) : position + 12].strip("\r\n"), limit=40)


def _checked(value: Any, line: int, characters: int, source: TextSource, problems: Problems) -> JsonRow | None:
    """The row, or None with a problem when it is not an object, too deep, too wide, or holds an over-long text."""
    if not isinstance(value, dict):
        kind = {list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
        problems.add(
            source.at(line),
            f"the row is {kind}, an object is expected.",
            'Write it as an object, such as {"text": "..."}.',
        )
        return None
    if len(value) > MOST_COLUMNS:
        problems.add(source.at(line), f"{len(value):,} keys; at most {MOST_COLUMNS:,} are read.", "Drop keys.")
        return None
    if _depth(value) > DEEPEST:
        problems.add(source.at(line), f"JSON nested more than {DEEPEST} levels deep.", "Flatten the row.")
        return None
    if characters * 4 > LONGEST_TEXT_BYTES and _has_long_text(value):
        limit = format_bytes(LONGEST_TEXT_BYTES)
        problems.add(
            source.at(line),
            f"a single text longer than {limit}, the limit for one text.",
            f"Cut it into rows of at most {limit}.",
        )
        return None
    return JsonRow(line, value, characters)


def _depth(value: Any) -> int:
    """Levels of lists and objects; stops one above `DEEPEST`."""
    level: list[Any] = [value]
    depth = 0
    while level and depth <= DEEPEST:
        inner: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            inner.extend(child for child in children if isinstance(child, (dict, list)))
        level = inner
        depth += 1
    return depth


def _has_long_text(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) > LONGEST_TEXT_BYTES or len(value.encode("utf-8", "replace")) > LONGEST_TEXT_BYTES
    if isinstance(value, dict):
        return any(_has_long_text(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(_has_long_text(item) for item in value)


class _BrokenError(Exception):
    """Internal: the text at `position` of the buffer is not JSON."""

    def __init__(self, position: int, reason: str) -> None:
        self.position = position
        self.reason = reason


class _Scanner:
    """Reads JSON values one at a time from a stream, keeping no more than one of them in memory."""

    def __init__(self, source: TextSource) -> None:
        self._chunks = source.chunks(_CHUNK_CHARACTERS)
        self._decoder = json.JSONDecoder()
        self._ended = False
        self._lines_before = 0
        self.buffer = ""
        self.at = 0

    def line(self, position: int) -> int:
        return self._lines_before + self.buffer.count("\n", 0, position) + 1

    def column(self, position: int) -> int:
        return position - self.buffer.rfind("\n", 0, position)

    def forget(self) -> None:
        """Drops what has been read."""
        self._lines_before += self.buffer.count("\n", 0, self.at)
        self.buffer = self.buffer[self.at :]
        self.at = 0

    def peek(self) -> str:
        """The next character that is not blank, not consumed; empty at the end."""
        while True:
            self.at = _BLANK.match(self.buffer, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self._more():
                return ""

    def take(self, expected: str) -> None:
        """Consumes one character."""
        found = self.peek()
        if not found or found not in expected:
            names = " or ".join(f"'{one}'" for one in expected)
            raise _BrokenError(self.at, f"{names} expected" + ("" if found else ", but the file ends"))
        self.at += 1

    def value(self) -> Any:
        """The next value. Reads on while the value may only be cut by the end of the buffer."""
        self.peek()
        while True:
            try:
                value, self.at = self._decoder.raw_decode(self.buffer, self.at)
                return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self.buffer) - 12
                if not cut or len(self.buffer) - self.at > LONGEST_LINE_CHARACTERS or not self._more():
                    raise _BrokenError(error.pos, _plain(error.msg)) from None
            except (RecursionError, ValueError) as error:
                raise _BrokenError(self.at, _unreadable(error)[0].rstrip(".")) from None

    def _more(self) -> bool:
        """Doubles what is held, so that a long value is tried only a few times."""
        wanted = max(len(self.buffer) - self.at, _CHUNK_CHARACTERS)
        pieces: list[str] = []
        while wanted > 0 and not self._ended:
            piece = next(self._chunks, "")
            self._ended = not piece
            pieces.append(piece)
            wanted -= len(piece)
        self.buffer += "".join(pieces)
        return any(pieces)


def _json_values(source: TextSource, problems: Problems, *, array: bool) -> Iterator[JsonRow]:
    scanner = _Scanner(source)
    try:
        yield from _elements(scanner, source, problems) if array else _objects(scanner, source, problems)
    except _BrokenError as broken:
        line, column = scanner.line(broken.position), scanner.column(broken.position)
        near = _near(scanner.buffer, broken.position)
        problems.add(
            source.at(line),
            f"broken JSON at column {column}: {broken.reason}, near '{near}'.",
            "Correct the file there; JSON lines (one object a line, .jsonl) name every broken row at once.",
        )


def _elements(scanner: _Scanner, source: TextSource, problems: Problems) -> Iterator[JsonRow]:
    """The objects of an array that begins here, and the end of the file after it."""
    yield from _list_items(scanner, source, problems)
    if scanner.peek():
        raise _BrokenError(scanner.at, "the array has ended, but text follows")


def _list_items(scanner: _Scanner, source: TextSource, problems: Problems) -> Iterator[JsonRow]:
    scanner.take("[")
    if scanner.peek() == "]":
        scanner.at += 1
        return
    while True:
        scanner.peek()
        scanner.forget()
        line = scanner.line(0)
        value = scanner.value()
        row = _checked(value, line, scanner.at, source, problems)
        if row is not None:
            yield row
        scanner.take(",]")
        if scanner.buffer[scanner.at - 1] == "]":
            return


def _objects(scanner: _Scanner, source: TextSource, problems: Problems) -> Iterator[JsonRow]:
    """Objects one after another, or one object around a list of objects."""
    if scanner.peek() != "{":
        raise _BrokenError(scanner.at, "'[' or '{' expected")
    start = scanner.at
    try:
        first = scanner.value()
    except _BrokenError:
        if len(scanner.buffer) - start <= LONGEST_LINE_CHARACTERS:
            raise
        scanner.at = start
        yield from _wrapped(scanner, source, problems)
        return
    if not scanner.peek() and _wrapped_key(first) is not None:
        scanner.at = start
        yield from _wrapped(scanner, source, problems)
        return
    scanner.at = start
    while scanner.peek():
        scanner.forget()
        line = scanner.line(0)
        row = _checked(scanner.value(), line, scanner.at, source, problems)
        if row is not None:
            yield row


def _wrapped_key(value: dict[str, Any]) -> str | None:
    """The key of the one list of objects that an object is made around, or None. A single chat is a row itself."""
    lists = [key for key, inner in value.items() if isinstance(inner, list) and inner and isinstance(inner[0], dict)]
    return lists[0] if len(lists) == 1 and lists[0] not in _CHAT_LISTS else None


def _wrapped(scanner: _Scanner, source: TextSource, problems: Problems) -> Iterator[JsonRow]:
    """`{"version": 1, "data": [ {...}, {...} ]}`: the objects of the list; other values are passed over."""
    scanner.take("{")
    while True:
        scanner.forget()
        key = scanner.value()
        if not isinstance(key, str):
            raise _BrokenError(0, "a key in quotes expected")
        scanner.take(":")
        if _opens_rows(scanner):
            yield from _list_items(scanner, source, problems)
        else:
            scanner.value()
        scanner.take(",}")
        if scanner.buffer[scanner.at - 1] == "}":
            break
    if scanner.peek():
        raise _BrokenError(scanner.at, "the object has ended, but text follows")


def _opens_rows(scanner: _Scanner) -> bool:
    """Whether a list of objects begins here."""
    if scanner.peek() != "[":
        return False
    scanner.forget()
    scanner.at = 1
    is_rows = scanner.peek() == "{"
    scanner.at = 0
    return is_rows
