"""Spans that tags mark, for span precision, recall and F1. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SCHEME = re.compile(r"([BIESLUM])(?:[-_](.+))?")
_BEGINS, _ENDS = frozenset("BSU"), frozenset("ESLU")
_OUTSIDE = "O"

Span = tuple[int, int, str]
"""First position, position after the last, type."""


class SpanReader:
    """Reads spans from tag ids by what the tag names say.

    Names of the form `B-PER`, `I-PER` (IOB1, IOB2), with `E-`/`L-` and `S-`/`U-` (BIOES, BILOU), `O` outside: a span
    begins at B, S or U, and wherever the type changes or the tag before was outside or an end, as in the CoNLL-2000
    scorer; so ill-formed predictions have spans too. Other names are plain: each run of equal tags is a span, `O`
    outside if there is such a tag.
    """

    def __init__(self, names: Sequence[str]) -> None:
        matches = [_SCHEME.fullmatch(name) for name in names]
        inside = [match for name, match in zip(names, matches, strict=True) if name != _OUTSIDE]
        # A lone tag 'B' or 'S' among plain names is no scheme; all names must follow it, with B or I among them.
        letters = {match[1] for match in inside if match}
        self.has_scheme = bool(inside) and all(inside) and bool(letters & {"B", "I"})
        self._tags: list[tuple[str, str] | None] = [
            None if name == _OUTSIDE else (match[1], match[2] or "") if self.has_scheme and match else ("I", name)
            for name, match in zip(names, matches, strict=True)
        ]

    def spans(self, ids: Sequence[int]) -> list[Span]:
        """The spans of one example, in order."""
        found: list[Span] = []
        start, kind, closed = 0, None, True
        for at, number in enumerate(ids):
            tag = self._tags[number]
            here = None if tag is None else tag[1]
            begins = here is not None and tag is not None and (closed or here != kind or tag[0] in _BEGINS)
            if kind is not None and not closed and (here is None or begins):
                found.append((start, at, kind))
            if begins:
                start = at
            kind, closed = here, here is None
            if tag is not None and tag[0] in _ENDS:
                found.append((start, at + 1, tag[1]))
                closed = True
        if kind is not None and not closed:
            found.append((start, len(ids), kind))
        return found

    def counts(self, predicted: Sequence[int], actual: Sequence[int], lengths: Sequence[int]) -> tuple[int, int, int]:
        """(spans found exactly, spans predicted, spans there) over examples of these lengths laid end to end."""
        hits = guesses = truths = 0
        start = 0
        for length in lengths:
            truth = self.spans(actual[start : start + length])
            guess = self.spans(predicted[start : start + length])
            hits += len(set(truth) & set(guess))
            guesses += len(guess)
            truths += len(truth)
            start += length
        return hits, guesses, truths
