"""One pass over all rows of a split: faults with their lines, rows to drop with the reason, labels, and hashes.

The same reading of a row (`RowReader`) makes the examples later, so what the pass accepts cannot fail in training.
Loads no torch.
"""

from __future__ import annotations

import hashlib
import unicodedata
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.data import chat
from trimtab.data.formats import Rows
from trimtab.data.labels import LabelBook, flag_of, number_of
from trimtab.data.problems import Problems, TooManyProblemsError
from trimtab.data.rowstore import BLOCK_ROWS
from trimtab.data.task import CLASS_KINDS, TaskSpec
from trimtab.text import safe

EMPTY_TEXT = "empty text"
NO_LABEL = "no label"
DUPLICATE = "duplicate"
NO_ANSWER = "empty answer"
_SHOWN_LOCATIONS = 3
_BLANKS = "".join(
    chr(code)
    for code in [*range(0x3001), 0xFEFF, 0x3164, 0xFFA0]
    if chr(code).isspace() or unicodedata.category(chr(code)) == "Cf" or code in (0, 0x115F, 0x1160, 0xFEFF, 0x3164)
)
"""White space and characters without a glyph (zero width, soft hyphen, fillers): text of these alone is empty."""


def is_blank(text: str) -> bool:
    """Whether nothing in the text can be seen."""
    return not text.strip(_BLANKS)


class BadValueError(Exception):
    """Internal: a row that cannot be read. `column` is empty when the fault is not in one column."""

    def __init__(self, column: str, reason: str, cure: str) -> None:
        self.column, self.reason, self.cure = column, reason, cure


class Read(NamedTuple):
    """One row as its task reads it."""

    drop: str = ""
    """Why the row is left out; empty when it is used."""
    texts: tuple[str, ...] = ()
    """One text, a pair, or the words."""
    messages: tuple[chat.Message, ...] = ()
    codes: tuple[int, ...] = ()
    """Label codes of the split's book: one, several, or one per word."""
    value: float = 0.0


class RowReader:
    """Reads rows of one split for a task. `columns` are the ones that `read` wants values of."""

    def __init__(self, spec: TaskSpec, rows: Rows) -> None:
        self._spec = spec
        self._rows = rows
        self.book = LabelBook()
        known = rows.columns
        self.columns = tuple(name for name in (*spec.text_columns, *spec.label_columns) if name in known)
        readers: dict[str, Callable[[Mapping[str, Any]], Read]] = {
            "classification": self._one_label,
            "multilabel_classification": self._many_labels,
            "regression": self._number,
            "token_classification": self._tokens,
            "language_modelling": self._text_alone,
            "instruction": self._chat,
        }
        self._read = readers[spec.kind]
        self._class_names = rows.class_names.get(spec.label_columns[0], ()) if spec.label_columns else ()

    def read(self, values: Mapping[str, Any]) -> Read:
        """One row. Raises BadValueError."""
        return self._read(values)

    def _texts(self, values: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The texts, or None when one of them is empty."""
        texts: list[str] = []
        for name in self._spec.text_columns:
            text = values[name]
            if text is None:
                return None
            if not isinstance(text, str):
                raise BadValueError(
                    name, f"is {_kind(text)}, text is expected", "Write it as text, or name another column in data.text"
                )
            if is_blank(text):
                return None
            texts.append(text)
        return tuple(texts)

    def _label_code(self, column: str, value: Any) -> int | None:
        try:
            return self.book.code(value, self._class_names)
        except ValueError as error:
            raise BadValueError(column, str(error), "Correct the label, or name another column in data.label") from None

    def _text_alone(self, values: Mapping[str, Any]) -> Read:
        texts = self._texts(values)
        return Read(EMPTY_TEXT) if texts is None else Read(texts=texts)

    def _one_label(self, values: Mapping[str, Any]) -> Read:
        texts = self._texts(values)
        column = self._spec.label_columns[0]
        if texts is None:
            return Read(EMPTY_TEXT)
        code = self._label_code(column, values[column])
        return Read(NO_LABEL) if code is None else Read(texts=texts, codes=(code,))

    def _many_labels(self, values: Mapping[str, Any]) -> Read:
        texts = self._texts(values)
        first, *others = self._spec.label_columns
        codes = self._flags([first, *others], values) if others else self._label_list(first, values)
        if texts is None:
            return Read(EMPTY_TEXT)
        return Read(NO_LABEL) if codes is None else Read(texts=texts, codes=codes)

    def _flags(self, columns: Sequence[str], values: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The numbers of the columns that hold 1, None when one is missing."""
        codes: list[int] = []
        for number, name in enumerate(columns):
            try:
                flag = flag_of(values[name])
            except ValueError as error:
                raise BadValueError(name, str(error), "Write 0 or 1") from None
            if flag is None:
                return None
            if flag:
                codes.append(number)
        return tuple(codes)

    def _label_list(self, column: str, values: Mapping[str, Any]) -> tuple[int, ...] | None:
        listed = values[column]
        if listed is None:
            return None
        if not isinstance(listed, list):
            cure = 'Write a list, such as ["news", "sport"], or set task.kind: classification'
            raise BadValueError(column, f"is {_kind(listed)}, a list of labels is expected", cure)
        codes = [self._label_code(column, value) for value in listed]
        if None in codes:
            raise BadValueError(column, "has an empty label in its list", "Remove it")
        return tuple(sorted({code for code in codes if code is not None}))

    def _number(self, values: Mapping[str, Any]) -> Read:
        texts = self._texts(values)
        column = self._spec.label_columns[0]
        if texts is None:
            return Read(EMPTY_TEXT)
        try:
            number = number_of(values[column])
        except ValueError as error:
            cure = "Correct it or remove the row, or set task.kind: classification"
            raise BadValueError(column, str(error), cure) from None
        return Read(NO_LABEL) if number is None else Read(texts=texts, value=number)

    def _tokens(self, values: Mapping[str, Any]) -> Read:
        words_column, tags_column = self._spec.text_columns[0], self._spec.label_columns[0]
        words, tags = values[words_column], values[tags_column]
        if not words:
            return Read(EMPTY_TEXT)
        if tags is None:
            return Read(NO_LABEL)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadValueError(words_column, "is not a list of words", 'Write ["The", "cat"]')
        if not isinstance(tags, list):
            raise BadValueError(tags_column, f"is {_kind(tags)}, a list of tags is expected", 'Write ["O", "B-ANIMAL"]')
        if len(words) != len(tags):
            tagged = "1 tag" if len(tags) == 1 else f"{len(tags)} tags"
            spoken = "1 word" if len(words) == 1 else f"{len(words)} words"
            reason = f"has {tagged} for {spoken} in '{safe(words_column, limit=40)}'"
            raise BadValueError(tags_column, reason, "Give one tag to each word")
        codes = [self._label_code(tags_column, tag) for tag in tags]
        if None in codes:
            raise BadValueError(tags_column, f"lacks tag {codes.index(None) + 1}", "Give one tag to each word")
        if all(is_blank(word) for word in words):
            return Read(EMPTY_TEXT)
        return Read(texts=tuple(words), codes=tuple(code for code in codes if code is not None))

    def _chat(self, values: Mapping[str, Any]) -> Read:
        fmt = self._spec.chat_format or "messages"
        record = self._record(fmt, values)
        drop = _hollow(record, fmt)
        if drop:
            return Read(drop)
        try:
            messages = chat.to_messages(record, fmt)
        except ValueError as error:
            raise BadValueError("", str(error), "Correct or remove the row") from None
        return Read(messages=tuple(messages))

    def _record(self, fmt: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The row under the names that the format has; the job may have named other columns."""
        if fmt == "prompt_completion" and len(self._spec.text_columns) == 2:
            first, second = self._spec.text_columns
            return {"prompt": values[first], "completion": values[second]}
        if fmt == "messages" and len(self._spec.text_columns) == 1:
            return {"messages": values[self._spec.text_columns[0]]}
        return dict(values)


def _hollow(record: Mapping[str, Any], fmt: str) -> str:
    """Why a conversation has nothing to learn from; empty when it has."""
    if fmt in ("messages", "sharegpt"):
        turns = record.get("messages" if fmt == "messages" else "conversations")
        return EMPTY_TEXT if turns is None or turns == [] else ""
    asked, answered = ("instruction", "output") if fmt == "alpaca" else ("prompt", "completion")
    if fmt == "prompt_completion" and asked not in record:
        asked, answered = "question", "answer"
    extra = record.get("input") if fmt == "alpaca" else None
    if _is_void(record.get(asked)) and _is_void(extra):
        return EMPTY_TEXT
    return NO_ANSWER if _is_void(record.get(answered)) else ""


def _is_void(value: Any) -> bool:
    return value is None or (isinstance(value, str) and is_blank(value))


def _kind(value: Any) -> str:
    """What a value is, in a user's words."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return f"a number ({value})"
    if isinstance(value, list):
        return "a list"
    return {dict: "an object", str: "text", type(None): "missing"}.get(type(value), f"a {type(value).__name__}")


@dataclass
class Scan:
    """What the pass found. All arrays have one entry per row."""

    rows: Rows
    kept: NDArray[np.bool_]
    texts: NDArray[np.uint64]
    """Hash of what the model reads; equal for equal text."""
    wholes: NDArray[np.uint64]
    """Hash of text and label together."""
    codes: list[tuple[int, ...]]
    """Label codes; for tags the different ones of the row."""
    values: NDArray[np.float64]
    book: LabelBook
    drops: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Rows left out, by reason."""

    def drop(self, reason: str, rows: Sequence[int]) -> None:
        """Leaves rows out."""
        self.kept[list(rows)] = False
        self.drops.setdefault(reason, []).extend(rows)

    def locations(self, rows: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.rows.location(row) for row in rows[:_SHOWN_LOCATIONS])


def scan(spec: TaskSpec, rows: Rows, problems: Problems) -> Scan:
    """Reads every row of a split. Faults go to `problems`; a row with one is not kept."""
    reader = RowReader(spec, rows)
    count = len(rows)
    found = Scan(
        rows=rows,
        kept=np.ones(count, dtype=np.bool_),
        texts=np.zeros(count, dtype=np.uint64),
        wholes=np.zeros(count, dtype=np.uint64),
        codes=[],
        values=np.zeros(count, dtype=np.float64),
        book=reader.book,
    )
    hasher = _Hasher(spec, found)
    for start in range(0, count, BLOCK_ROWS):
        columns = rows.read(reader.columns, start, min(start + BLOCK_ROWS, count))
        try:
            _scan_block(reader, hasher, found, problems, start, columns)
        except TooManyProblemsError:
            break
    hasher.write()
    return found


def _scan_block(
    reader: RowReader, hasher: _Hasher, found: Scan, problems: Problems, start: int, columns: Mapping[str, list[Any]]
) -> None:
    names = reader.columns
    for row, values in enumerate(zip(*(columns[name] for name in names), strict=True), start=start):
        try:
            read = reader.read(dict(zip(names, values, strict=True)))
        except BadValueError as error:
            read = Read("fault")
            where = f"column '{safe(error.column, limit=60)}' " if error.column else ""
            problems.add(found.rows.location(row), f"{where}{error.reason}.", f"{error.cure}.")
        if read.drop:
            found.kept[row] = False
            if read.drop != "fault":
                found.drops.setdefault(read.drop, []).append(row)
        hasher.add(row, read)


class _Hasher:
    """Hashes and labels of all rows, gathered in compact arrays."""

    def __init__(self, spec: TaskSpec, found: Scan) -> None:
        self._found = found
        self._spec = spec
        self._texts, self._wholes = array("Q"), array("Q")
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._with_codes = spec.kind in CLASS_KINDS

    def add(self, row: int, read: Read) -> None:
        if read.drop:
            self._texts.append(0)
            self._wholes.append(0)
            self._found.codes.append(())
            return
        text = _hash(_joined(read))
        self._texts.append(text)
        codes = read.codes
        if self._spec.kind == "regression":
            self._found.values[row] = read.value
            self._wholes.append(_hash(f"{text} {read.value}"))
            self._found.codes.append(())
            return
        self._wholes.append(_hash(f"{text} {codes}") if self._with_codes else text)
        if self._spec.kind == "token_classification":
            codes = tuple(sorted(set(codes)))
        # Most rows share few label sets; one tuple for each keeps a million rows small.
        self._found.codes.append(self._shared.setdefault(codes, codes))

    def write(self) -> None:
        for source, target in ((self._texts, self._found.texts), (self._wholes, self._found.wholes)):
            target[: len(source)] = np.frombuffer(source, dtype=np.uint64) if len(source) else 0


def _joined(read: Read) -> str:
    if read.messages:
        return "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in read.messages)
    return "\x1f".join(read.texts)


def _hash(text: str) -> int:
    """64 bits: in a million rows two different texts meet by chance once in 37 million data sets."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
