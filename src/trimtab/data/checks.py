"""What labels and texts of both splits say together: names and their order, what cannot be learned, what to warn of.

Loads no torch.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trimtab.data.columns import ModelHints
from trimtab.data.labels import is_number, sorted_names
from trimtab.data.problems import Problems, TooManyProblemsError
from trimtab.data.scan import Scan
from trimtab.data.task import CLASS_KINDS, LABELLED_KINDS, LANGUAGE_KINDS, TaskSpec
from trimtab.errors import DataError, did_you_mean
from trimtab.text import safe

MOST_NUMBER_CLASSES = 1000
"""Numbers with more different values than this are values to predict, not names of classes."""
_SHOWN_LABELS = 10


def _counts(found: Scan, rows: NDArray[np.int64]) -> dict[int, int]:
    """Examples with each label code."""
    counts: dict[int, int] = {}
    for row in rows.tolist():
        for code in found.codes[row]:
            counts[code] = counts.get(code, 0) + 1
    return counts


def _kept(found: Scan) -> NDArray[np.int64]:
    return np.flatnonzero(found.kept).astype(np.int64)


def _present(found: Scan) -> list[str]:
    """Labels that some row in use has."""
    names = found.book.names
    return [names[code] for code in sorted(_counts(found, _kept(found)))]


def _shown(names: list[str]) -> str:
    listed = ", ".join(f"'{safe(name, limit=40)}'" for name in names[:_SHOWN_LABELS])
    return f"{listed} and {len(names) - _SHOWN_LABELS} more" if len(names) > _SHOWN_LABELS else listed


def name_labels(spec: TaskSpec, train: Scan, model: ModelHints) -> TaskSpec:
    """The spec with its label names in the order of their ids.

    Order: of the file's own class names; else of the model's, when they contain all labels of the data (its head then
    keeps what it knows); else numbers by value and text by code point.
    """
    if spec.kind not in CLASS_KINDS:
        return spec
    first, *others = spec.label_columns
    if others:
        return replace(spec, label_names=spec.label_columns)
    present = _present(train)
    from_file = train.rows.class_names.get(first, ())
    if from_file and set(present) <= set(from_file):
        return _named(spec, from_file, "as the data file orders them")
    if model.label_names and present and set(present) <= set(model.label_names):
        return _named(spec, model.label_names, "as the model already knows them")
    return _named(spec, sorted_names(present), "sorted")


def _named(spec: TaskSpec, names: tuple[str, ...], order: str) -> TaskSpec:
    reason = f"{len(names):,} labels, {order}: {_shown(list(names))}."
    return replace(spec, label_names=names, reasons=(*spec.reasons, reason))


def check_labels(spec: TaskSpec, train: Scan, evaluation: Scan | None) -> None:
    """Raises DataError when the labels cannot be learned from, or evaluation has some that training lacks."""
    if spec.kind not in LABELLED_KINDS:
        return
    if spec.kind == "regression":
        _check_values(train)
    elif len(spec.label_columns) > 1:
        _check_flags(spec, train)
    else:
        _check_classes(spec, train)
        if evaluation is not None:
            _check_eval_labels(spec, evaluation)


def check_known_labels(spec: TaskSpec, evaluation: Scan) -> None:
    """Raises DataError for labels that a trained model does not know."""
    if spec.kind in LABELLED_KINDS and spec.kind != "regression" and len(spec.label_columns) == 1:
        _check_eval_labels(spec, evaluation)


def _check_values(train: Scan) -> None:
    values = train.values[train.kept]
    if len(values) > 1 and np.all(values == values[0]):
        raise DataError(
            f"all {len(values):,} targets are {values[0]:g}: there is nothing to learn.",
            cure="Name another column with data.label.",
            location=train.rows.files[0],
        )


def _check_flags(spec: TaskSpec, train: Scan) -> None:
    if not _counts(train, _kept(train)):
        raise DataError(
            f"no row has a 1 in any of the {len(spec.label_columns)} label columns.",
            cure="Check the columns that data.label names.",
            location=train.rows.files[0],
        )


def _check_classes(spec: TaskSpec, train: Scan) -> None:
    present = _present(train)
    rows = int(train.kept.sum())
    column = safe(spec.label_columns[0], limit=60)
    if not present or (len(present) == 1 and spec.kind != "multilabel_classification"):
        what = "no row has a label" if not present else f"all {rows:,} rows have the label {_shown(present)}"
        raise DataError(
            f"{what} in column '{column}': there is nothing to tell apart.",
            cure="Add rows of another class, or name another column with data.label.",
            location=train.rows.files[0],
        )
    if spec.kind == "classification":
        _check_class_count(present, rows, column, train)


def _check_class_count(present: list[str], rows: int, column: str, train: Scan) -> None:
    numeric = sum(is_number(name) for name in present)
    too_many = len(present) * 2 > rows and len(present) > 2
    if not too_many and not (len(present) > MOST_NUMBER_CLASSES and numeric == len(present)):
        return
    hint = f", {numeric:,} of them numbers" if numeric else ""
    cure = "Name another column with data.label, or add rows."
    if numeric == len(present):
        cure = "Set task.kind: regression to predict numbers, or name another column with data.label."
    raise DataError(
        f"column '{column}' has {len(present):,} different labels in {rows:,} rows{hint}; a class needs several rows.",
        cure=cure,
        location=train.rows.files[0],
    )


def _check_eval_labels(spec: TaskSpec, evaluation: Scan) -> None:
    """Names each label that training lacks, at its first line."""
    problems = Problems()
    known = set(spec.label_names)
    first: dict[int, int] = {}
    for row in _kept(evaluation).tolist():
        for code in evaluation.codes[row]:
            first.setdefault(code, row)
    names = evaluation.book.names
    try:
        for code, row in sorted(first.items(), key=lambda pair: pair[1]):
            if names[code] not in known:
                hint = did_you_mean(names[code], [safe(name, limit=40) for name in spec.label_names[:_SHOWN_LABELS]])
                problems.add(
                    evaluation.rows.location(row),
                    f"the label '{safe(names[code], limit=60)}' occurs in evaluation but not in training.",
                    f"Correct it, or add such rows to data.train. {hint}",
                )
    except TooManyProblemsError:
        pass
    problems.raise_if_any()


def text_warnings(
    spec: TaskSpec,
    train: Scan,
    evaluation: Scan,
    train_rows: NDArray[np.int64],
    eval_rows: NDArray[np.int64] | None,
) -> list[str]:
    """Warnings on labels and on texts that contradict each other."""
    if spec.kind in LANGUAGE_KINDS:
        return []
    warnings = _spelling(train)
    conflict = _conflicts(train)
    if conflict:
        count, places = conflict
        what = "1 text occurs" if count == 1 else f"{count:,} texts occur"
        warnings.append(f"{what} with different labels, first at {' and '.join(places)}.")
    if spec.kind in CLASS_KINDS:
        warnings += _one_sided(spec, train, evaluation, train_rows, eval_rows)
    return warnings


def _spelling(train: Scan) -> list[str]:
    warnings: list[str] = []
    if train.book.stripped:
        count = train.book.stripped
        warnings.append(f"{count:,} {'label has' if count == 1 else 'labels have'} blanks around it; they are ignored.")
    if train.book.is_mixed:
        warnings.append("Some labels are numbers and some are numbers in quotes; 1 and '1' are taken as one label.")
    return warnings


def _conflicts(train: Scan) -> tuple[int, tuple[str, ...]] | None:
    """(texts with more than one label, the first two places of one of them). Repeats are gone before."""
    rows = _kept(train)
    _, first, counts = np.unique(train.texts[rows], return_index=True, return_counts=True)
    several = counts > 1
    if not several.any():
        return None
    start = int(rows[first[several].min()])
    same = rows[train.texts[rows] == train.texts[start]]
    return int(several.sum()), train.locations(same[:2].tolist())


def _one_sided(
    spec: TaskSpec,
    train: Scan,
    evaluation: Scan,
    train_rows: NDArray[np.int64],
    eval_rows: NDArray[np.int64] | None,
) -> list[str]:
    """Labels that no training row has, or that only training rows have."""
    names = list(spec.label_names) if len(spec.label_columns) > 1 else train.book.names
    in_train = {names[code] for code in _counts(train, train_rows)}
    absent = [name for name in spec.label_names if name not in in_train]
    warnings = [f"No training example has the label {_shown(absent)}."] if absent else []
    if eval_rows is not None:
        eval_names = names if len(spec.label_columns) > 1 else evaluation.book.names
        in_eval = {eval_names[code] for code in _counts(evaluation, eval_rows)}
        only = [name for name in spec.label_names if name in in_train and name not in in_eval]
        if only:
            warnings.append(f"No evaluation example has the label {_shown(only)}: it is learned but not measured.")
    return warnings


def leak_warnings(train: Scan, evaluation: Scan | None) -> list[str]:
    """Evaluation texts that were also trained on. A split made here has none."""
    if evaluation is None:
        return []
    rows = _kept(evaluation)
    shared = rows[np.isin(evaluation.texts[rows], train.texts[train.kept])].tolist()
    if not shared:
        return []
    places = ", ".join(evaluation.locations(shared))
    return [
        f"{len(shared):,} of {len(rows):,} evaluation texts are also in training ({places}): "
        "what is measured on them is not what new text would give."
    ]
