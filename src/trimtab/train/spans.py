"""Spans that tags of words mark, and how many of them were found: precision, recall and F1 of token classification.

The tags may be IOB2, IOB1, BIOES, BILOU or BMES, with a type (`B-person`, `B_person`) or without (`B`), or plain names
(`city`), where neighbours of one name are one span. A tag that breaks its scheme, such as an `I` that follows nothing,
is read as most evaluations of this task read it: it opens a span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.train.counts import ratio

OUTSIDE = "O"
_PREFIXED = re.compile(r"([BIOESLUM])(?:[-_](.+))?", re.DOTALL)
_OPENING, _CLOSING = frozenset("BSU"), frozenset("ESLU")

Span = tuple[int, int, str]
"""(first word, word after the last, type)."""


@dataclass(frozen=True)
class Tag:
    """What one tag says of its word."""

    type: str
    outside: bool = False
    opens: bool = False
    """It never continues the span before it."""
    closes: bool = False
    """Its span ends with it."""


def read_tags(names: Sequence[str]) -> tuple[Tag, ...]:
    """The meaning of each tag name. A scheme of prefixes is one only where every name follows it."""
    found = [_PREFIXED.fullmatch(name) for name in names]
    # Bare letters may also be plain names, such as the sizes S, M and L: there the scheme's B or I must be among them.
    marks = {match[1] for match in found if match and (match[2] or match[1] in "BI")}
    if all(found) and marks & set("BISU"):
        return tuple(_prefixed(match[1], match[2] or "") for match in found if match)
    return tuple(Tag(name, outside=name == OUTSIDE) for name in names)


def _prefixed(letter: str, kind: str) -> Tag:
    return Tag(kind, outside=letter == OUTSIDE, opens=letter in _OPENING, closes=letter in _CLOSING)


def spans(tags: Iterable[Tag]) -> set[Span]:
    """The spans of one sequence of words."""
    found: set[Span] = set()
    start: int | None = None
    kind, end = "", 0
    for place, tag in enumerate(tags):
        if start is not None and (tag.outside or tag.opens or tag.type != kind):
            found.add((start, place, kind))
            start = None
        end = place + 1
        if tag.outside:
            continue
        if start is None:
            start, kind = place, tag.type
        if tag.closes:
            found.add((start, end, kind))
            start = None
    if start is not None:
        found.add((start, end, kind))
    return found


@dataclass
class SpanCounts:
    """Exact counts over any number of sequences. A span counts as found when its borders and type are both right."""

    right: int = 0
    predicted: int = 0
    actual: int = 0

    def add(self, predicted: Iterable[Tag], actual: Iterable[Tag]) -> None:
        """Counts one sequence."""
        ours, theirs = spans(predicted), spans(actual)
        self.right += len(ours & theirs)
        self.predicted += len(ours)
        self.actual += len(theirs)

    def rates(self) -> dict[str, float]:
        """`precision`, `recall` and `f1`; nan where nothing was predicted, nothing was there to find, or both."""
        return {
            "precision": ratio(self.right, self.predicted),
            "recall": ratio(self.right, self.actual),
            "f1": ratio(2 * self.right, self.predicted + self.actual),
        }
