"""The parts of the truth report: lengths, cuts and labels of one split, measured from its token store, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.data.encoding import LOST_BY_CUT
from trimtab.data.task import TaskSpec
from trimtab.data.tokenstore import TokenDrop, TokenStore
from trimtab.text import safe

_SHOWN_CLASSES = 8


@dataclass(frozen=True)
class Lengths:
    """Tokens per example before the cut."""

    mean: float
    median: float
    p95: float
    longest: int
    bins: tuple[tuple[int, int, int], ...]
    """(from, to, examples): both ends belong to the bin; widths double."""


@dataclass(frozen=True)
class Cut:
    """What `max_length` takes away."""

    max_length: int
    examples: int
    """Examples that are in use and were cut."""
    tokens: int
    targets: int
    """Targets lost in examples that keep others."""
    examples_without_target: int
    """Examples that lost every target, and are therefore dropped."""


@dataclass(frozen=True)
class ClassCount:
    """How often one class (or tag) is the target."""

    name: str
    count: int
    share: float


@dataclass(frozen=True)
class Values:
    """Targets of a regression."""

    smallest: float
    mean: float
    largest: float
    deviation: float


@dataclass(frozen=True)
class Split:
    """Training or evaluation data."""

    name: str
    examples: int
    tokens: int
    target_tokens: int
    """Targets that count in the loss: per-token tasks; else one per example."""
    lengths: Lengths
    cut: Cut
    classes: tuple[ClassCount, ...] = ()
    values: Values | None = None


def measure_split(name: str, store: TokenStore, spec: TaskSpec) -> Split:
    """All that the report says of one store."""
    classes, values = (), None
    if spec.kind == "regression":
        values = _values(store.label_array())
    elif spec.label_names:
        classes = _classes(store, spec)
    return Split(
        name=name,
        examples=len(store),
        tokens=store.token_count,
        target_tokens=int(store.target_counts.sum(dtype=np.int64)),
        lengths=measure_lengths(store.stats.original_lengths),
        cut=_cut(store),
        classes=classes,
        values=values,
    )


def measure_lengths(lengths: NDArray[Any]) -> Lengths:
    """Mean, median, 95th percentile, longest and a histogram of `lengths` [N]."""
    if not len(lengths):
        return Lengths(0.0, 0.0, 0.0, 0, ())
    longest = int(lengths.max())
    edges = [1]
    while edges[-1] <= longest:
        edges.append(edges[-1] * 2)
    counts = np.histogram(lengths, bins=edges)[0].tolist() if len(edges) > 1 else []
    if counts:
        # numpy closes the last bin at both ends; no length reaches its upper edge.
        first = next(index for index, count in enumerate(counts) if count)
        bins = tuple((edges[i], edges[i + 1] - 1, counts[i]) for i in range(first, len(counts)))
    else:
        bins = ()
    median, p95 = (float(value) for value in np.percentile(lengths, [50, 95]))
    return Lengths(float(lengths.mean()), median, p95, longest, bins)


def _cut(store: TokenStore) -> Cut:
    cut = store.stats.original_lengths.astype(np.int64) - store.lengths
    lost = sum(drop.count for drop in store.stats.dropped if drop.reason in LOST_BY_CUT)
    return Cut(
        store.stats.max_length,
        int((cut > 0).sum()),
        int(cut.sum()),
        int(store.stats.targets_lost.sum(dtype=np.int64)),
        lost,
    )


def _classes(store: TokenStore, spec: TaskSpec) -> tuple[ClassCount, ...]:
    names = spec.label_names
    if spec.kind == "token_classification":
        counts, total = store.tag_counts(len(names)), 0
    elif spec.kind == "multilabel_classification":
        counts, total = store.label_array().sum(axis=0, dtype=np.float64).astype(np.int64), len(store)
    else:
        counts, total = np.bincount(store.label_array(), minlength=len(names)), 0
    whole = max(total or int(counts.sum()), 1)
    return tuple(ClassCount(name, count, count / whole) for name, count in zip(names, counts.tolist(), strict=False))


def _values(values: NDArray[Any]) -> Values | None:
    if not len(values):
        return None
    return Values(float(values.min()), float(values.mean()), float(values.max()), float(values.std()))


def histogram_lines(split: Split) -> list[str]:
    """The lengths of a split as bars."""
    lines = [f"Lengths in tokens, {split.name}:"]
    most = max((count for _, _, count in split.lengths.bins), default=1)
    for low, high, count in split.lengths.bins:
        bar = "#" * max(round(40 * count / most), 1 if count else 0)
        lines.append(f"  {low:>7,} to {high:>7,}  {count:>9,}  {bar}".rstrip())
    return lines


def drop_line(drop: TokenDrop) -> str:
    """`12: it is empty (data.csv:3, data.csv:9, ...)`."""
    places = [safe(place, limit=80) for place in drop.locations]
    more = ", ..." if drop.count > len(places) else ""
    where = f" ({', '.join(places)}{more})" if places else ""
    return f"{drop.count:,}: {safe(drop.reason, limit=200)}{where}"


def split_lines(split: Split) -> list[str]:
    """Lengths, cuts and labels of a split in a few lines."""
    lengths, cut = split.lengths, split.cut
    lines = [
        f"{split.name}: {split.tokens:,} tokens, {split.target_tokens:,} targets; length mean {lengths.mean:.0f}, "
        f"median {lengths.median:.0f}, 95 % up to {lengths.p95:.0f}, longest {lengths.longest:,}"
    ]
    if cut.examples or cut.examples_without_target:
        share = cut.examples / max(split.examples, 1)
        lines.append(
            f"  cut at {cut.max_length:,}: {cut.examples:,} examples ({share:.1%}) lose {cut.tokens:,} tokens and "
            f"{cut.targets:,} targets; {cut.examples_without_target:,} lose every target"
        )
    elif split.examples:
        lines.append(f"  max_length {cut.max_length:,} cuts nothing")
    if split.classes:
        ordered = sorted(split.classes, key=lambda one: -one.count)
        shown = [f"{safe(one.name, limit=40)} {one.count:,} ({one.share:.1%})" for one in ordered[:_SHOWN_CLASSES]]
        more = [f"{len(ordered) - _SHOWN_CLASSES} more"] if len(ordered) > _SHOWN_CLASSES else []
        lines.append(f"  labels: {', '.join([*shown, *more])}")
    if split.values is not None:
        values = split.values
        lines.append(
            f"  values: {values.smallest:g} to {values.largest:g}, mean {values.mean:.3g} +- {values.deviation:.3g}"
        )
    return lines


def listing(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN_CLASSES} more" if len(names) > _SHOWN_CLASSES else ""
    return ", ".join(names[:_SHOWN_CLASSES]) + more
