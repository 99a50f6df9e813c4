"""Rows to examples: the task inferred, labels named, faults named, what is left out counted, and the split made.

Everything is refused or said here, before any weight is loaded. Loads no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trimtab.data import columns, scan, split
from trimtab.data.checks import check_known_labels, check_labels, leak_warnings, name_labels, text_warnings
from trimtab.data.columns import ModelHints
from trimtab.data.formats import Rows
from trimtab.data.problems import Problems
from trimtab.data.task import CLASS_KINDS, WHOLE_TEXT_KINDS, Example, TaskSpec
from trimtab.errors import DataError, JobError, did_you_mean
from trimtab.job import Job
from trimtab.text import safe

__all__ = ["Dropped", "Examples", "ModelHints", "Prepared", "prepare", "prepare_evaluation"]


@dataclass(frozen=True)
class Dropped:
    """Rows left out for one reason."""

    reason: str
    split: str
    """`train` or `eval`."""
    count: int
    locations: tuple[str, ...]
    """The first three."""


@dataclass(frozen=True)
class Examples:
    """Rows of one split as examples, made when they are asked for."""

    rows: Rows
    spec: TaskSpec
    indices: NDArray[np.int64] = field(repr=False)
    """Rows in use, in rising order."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        at = range(len(self))[index]
        return self._make(self.indices[at : at + 1])[0]

    def batches(self, size: int) -> Iterator[list[Example]]:
        """All examples in order, `size` at a time; reads slices of the memory-mapped table."""
        for start in range(0, len(self), size):
            yield self._make(self.indices[start : start + size])

    def labels(self) -> NDArray[np.int64] | NDArray[np.float64]:
        """Targets of tasks on whole texts: class ids int64 [n], values float64 [n], or 0/1 float64 [n, classes]."""
        kind = self.spec.kind
        if kind not in WHOLE_TEXT_KINDS:
            raise ValueError(f"{kind} has no label per example")
        targets = [example.target for batch in self.batches(4096) for example in batch]
        return np.array(targets, np.int64) if kind == "classification" else np.array(targets, np.float64)

    @property
    def digest(self) -> str:
        """sha256 of content, task and row numbers: equal digests give equal examples."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        spec = replace(self.spec, reasons=())
        whole = hashlib.sha256(f"{self.rows.digest} {spec!r}".encode())
        whole.update(np.ascontiguousarray(self.indices, dtype="<i8").tobytes())
        return whole.hexdigest()

    @cached_property
    def _reader(self) -> scan.RowReader:
        return scan.RowReader(self.spec, self.rows)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.spec.label_names)}

    def _make(self, indices: NDArray[np.int64]) -> list[Example]:
        reader = self._reader
        values = self.rows.pick(reader.columns, indices)
        records = zip(*(values[name] for name in reader.columns), strict=True)
        return [
            self._example(row, reader.read(dict(zip(reader.columns, record, strict=True))))
            for row, record in zip(indices.tolist(), records, strict=True)
        ]

    def _example(self, row: int, read: scan.Read) -> Example:
        kind = self.spec.kind
        if kind == "instruction":
            return Example(row, messages=read.messages)
        if kind == "language_modelling":
            return Example(row, texts=read.texts)
        if kind == "regression":
            return Example(row, texts=read.texts, target=read.value)
        ids = self._label_ids(read.codes)
        if kind == "token_classification":
            return Example(row, words=read.texts, target=ids)
        if kind == "classification":
            return Example(row, texts=read.texts, target=ids[0])
        on = set(ids)
        return Example(row, texts=read.texts, target=tuple(float(one in on) for one in range(len(self._ids))))

    def _label_ids(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        if len(self.spec.label_columns) > 1:
            return codes
        names = self._reader.book.names
        return tuple(self._ids[names[code]] for code in codes)


@dataclass(frozen=True)
class Prepared:
    """Data ready for the tokenizer."""

    spec: TaskSpec
    train: Examples
    eval: Examples | None
    dropped: tuple[Dropped, ...]
    warnings: tuple[str, ...]


def prepare(job: Job, train: Rows, evaluation: Rows | None, model: ModelHints) -> Prepared:
    """Checks all rows and makes the examples of both splits.

    Left out are rows without text or label and, in train, exact repeats of text and label. When `evaluation` is None,
    `data.eval_fraction` of the rows is held out; equal texts, and equal values of `data.group_by`, stay on one side.
    When no row can be held out, that is an error if the job asks for it and a warning if it only leaves the default.

    Raises:
        JobError: settings that contradict the data or the model, a column that is not there.
        DataError: every faulty row of both splits; labels that cannot be learned from; nothing left.
    """
    spec = columns.infer(job, train, model)
    if evaluation is not None:
        columns.check_columns(spec, evaluation, "data.eval")
    problems = Problems()
    train_scan = scan.scan(spec, train, problems)
    eval_scan = None if evaluation is None else scan.scan(spec, evaluation, problems)
    problems.raise_if_any()
    _drop_repeats(train_scan)
    for name, one in (("train", train_scan), ("eval", eval_scan)):
        _refuse_empty(one, name)
    spec = name_labels(spec, train_scan, model)
    check_labels(spec, train_scan, eval_scan)
    train_rows, eval_rows, warnings = _sides(job, spec, train_scan, eval_scan)
    eval_source = train_scan if eval_scan is None else eval_scan
    warnings = [
        *text_warnings(spec, train_scan, eval_source, train_rows, eval_rows),
        *leak_warnings(train_scan, eval_scan),
        *warnings,
    ]
    held = None if eval_rows is None else Examples(eval_source.rows, spec, eval_rows)
    dropped = [*_dropped(train_scan, "train"), *([] if eval_scan is None else _dropped(eval_scan, "eval"))]
    return Prepared(spec, Examples(train, spec, train_rows), held, tuple(dropped), tuple(warnings))


def prepare_evaluation(spec: TaskSpec, rows: Rows) -> Examples:
    """Rows as examples of a task that is known already: all with text and label, repeats too.

    Raises DataError as `prepare` does, also for labels that the task does not have.
    """
    columns.check_columns(spec, rows, "the data")
    problems = Problems()
    found = scan.scan(spec, rows, problems)
    problems.raise_if_any()
    _refuse_empty(found, "the data")
    check_known_labels(spec, found)
    return Examples(rows, spec, np.flatnonzero(found.kept).astype(np.int64))


def _drop_repeats(train: scan.Scan) -> None:
    rows = np.flatnonzero(train.kept)
    _, first = np.unique(train.wholes[rows], return_index=True)
    repeats = np.setdiff1d(np.arange(len(rows)), first)
    if len(repeats):
        train.drop(scan.DUPLICATE, rows[repeats].tolist())


def _dropped(found: scan.Scan, name: str) -> list[Dropped]:
    return [Dropped(reason, name, len(rows), found.locations(rows)) for reason, rows in found.drops.items()]


def _refuse_empty(found: scan.Scan | None, name: str) -> None:
    if found is None or found.kept.any():
        return
    reasons = [f"{one.count:,} with {one.reason} ({', '.join(one.locations)})" for one in _dropped(found, name)]
    raise DataError(
        f"none of the {len(found.kept):,} rows of {name} can be used: {'; '.join(reasons)}.",
        cure="Fill the column, or name another one with data.text or data.label.",
        location=found.rows.files[0],
    )


def _sides(
    job: Job, spec: TaskSpec, train: scan.Scan, evaluation: scan.Scan | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, list[str]]:
    """(train rows, eval rows or None, warnings)."""
    rows = np.flatnonzero(train.kept).astype(np.int64)
    if evaluation is not None:
        held = np.flatnonzero(evaluation.kept).astype(np.int64)
        larger = [f"Evaluation has {len(held):,} examples, more than the {len(rows):,} of training."]
        return rows, held, larger if len(held) > len(rows) else []
    fraction = job.data.eval_fraction
    if fraction == 0:
        return rows, None, []
    if len(rows) < 2:
        return rows, None, ["There is one example only: nothing is held out for evaluation."]
    groups = _groups(job, train, rows)
    classes = [train.codes[row] for row in rows.tolist()] if spec.kind in CLASS_KINDS else None
    try:
        kept, held = split.hold_out(len(rows), fraction, job.training.seed, classes=classes, groups=groups)
    except ValueError as error:
        if not {"eval_fraction", "group_by"} & job.data.model_fields_set:
            return rows, None, [f"Nothing is held out for evaluation: {error}."]
        raise DataError(
            f"no evaluation data can be split off: {error}.",
            cure="Name evaluation data in data.eval, or set data.eval_fraction: 0.",
            location=train.rows.files[0],
        ) from None
    return rows[kept], rows[held], _split_warnings(len(held), fraction, len(rows))


def _split_warnings(held: int, fraction: float, count: int) -> list[str]:
    if abs(held - fraction * count) <= max(1.0, 0.1 * fraction * count):
        return []
    return [f"{held:,} of {count:,} examples are held out, not {fraction:.0%}: groups and classes allow no nearer."]


def _groups(job: Job, train: scan.Scan, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Which examples must stay together; None when each may go alone."""
    texts = train.texts[rows]
    column = job.data.group_by
    if column is None:
        return split.joined_groups(texts) if len(np.unique(texts)) < len(texts) else None
    if column not in train.rows.columns:
        raise JobError(
            f"data.group_by: {train.rows.files[0]} has no column '{safe(column, limit=60)}'.",
            cure=did_you_mean(column, train.rows.columns),
        )
    return split.joined_groups(texts, _group_numbers(train.rows, column)[rows])


def _group_numbers(rows: Rows, column: str) -> NDArray[np.int64]:
    """A number for each value of a column; a row without a value is a group of its own."""
    numbers: dict[str, int] = {}
    result = np.empty(len(rows), dtype=np.int64)
    step = 65_536
    for start in range(0, len(rows), step):
        values: Sequence[object] = rows.read([column], start, min(start + step, len(rows)))[column]
        for row, value in enumerate(values, start=start):
            empty = value is None or value == ""
            result[row] = -1 - row if empty else numbers.setdefault(repr(value), len(numbers))
    return result
