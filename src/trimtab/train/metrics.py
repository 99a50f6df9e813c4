"""Metrics of each task, exact over the whole evaluation set.

A metric is a few counts that add up and, where ranks matter (AUROC, Spearman), the scores of every example. So batches
come in any cut, nothing is averaged over batches, and the parts of several processes merge by sums and joins.

Counts and ranks are computed here, in integers and float64, and compared with scikit-learn and torchmetrics in the
tests. Importing torchmetrics itself pulls scipy.signal and the text models of its BERT score: 1.3 to 2.0 s before the
first evaluation (torchmetrics 1.9, 2 cores), and its metric objects wait for other processes on their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.data.task import TaskSpec
from trimtab.errors import JobError, did_you_mean
from trimtab.train.ranks import Floats, auroc, comparable, midranks, pearson
from trimtab.train.spans import SpanReader

AUROC_CLASSES = 50
"""With more classes AUROC is not measured: it alone needs every score of every example."""

LOWER_IS_BETTER = ("loss", "perplexity", "mae", "mse")


@dataclass
class Part:
    """What some batches add to the metrics."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Counts and sums, float64 or int64."""
    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    """Per example, on the CPU."""

    def add(self, other: Part) -> None:
        """Takes in another part."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, values in other.kept.items():
            self.kept.setdefault(name, []).extend(values)

    def count(self, name: str) -> NDArray[Any]:
        """One of the sums as an array."""
        return self.sums[name].cpu().numpy()

    def joined(self, name: str) -> Floats:
        """All that was kept under a name, in float64."""
        return torch.cat(self.kept[name]).double().numpy()


Take = Callable[[Tensor, Tensor, Sequence[int]], Part]
"""(outputs, targets, targets of each example) -> what the batch adds."""

Report = Callable[[Part], Mapping[str, float]]


@dataclass(frozen=True)
class _Measures:
    names: tuple[str, ...]
    default_best: str
    take: Take
    report: Report


class TaskMetrics:
    """The metrics of one task over batches."""

    def __init__(self, kind: str, measures: _Measures) -> None:
        self._kind = kind
        self._measures = measures
        self._part = Part()

    @property
    def names(self) -> tuple[str, ...]:
        """All that `compute` gives, `loss` first."""
        return ("loss", *self._measures.names)

    @property
    def default_best(self) -> str:
        """The metric that picks the best checkpoint where the user names none."""
        return self._measures.default_best

    def higher_is_better(self, name: str) -> bool:
        return name not in LOWER_IS_BETTER

    def check_name(self, name: str) -> str:
        """The name, if it is one of this task's metrics; JobError with the nearest one otherwise."""
        if name not in self.names:
            raise JobError(
                f"training.best_metric: {name!r} is not measured for {self._kind}.",
                cure=did_you_mean(name, self.names),
            )
        return name

    def update(
        self,
        outputs: Tensor,
        targets: Tensor,
        loss_sum: Tensor | float,
        denominator: float,
        *,
        targets_per_example: Sequence[int] | None = None,
    ) -> None:
        """Takes in one batch.

        `outputs` and `targets` as in `trimtab.models.objective.Objective.evaluate` and `trimtab.data.batches.Batch`;
        `loss_sum` and `denominator` are the batch's sum of losses and of their weights. `targets_per_example` tells
        where examples end among the targets of token classification; None: the batch is one example.
        """
        loss = torch.as_tensor(loss_sum).detach().double()
        self._part.add(Part({"loss_sum": loss, "denominator": torch.tensor(denominator, dtype=torch.float64)}))
        if outputs.numel():
            borders = [targets.shape[0]] if targets_per_example is None else targets_per_example
            self._part.add(self._measures.take(outputs.detach(), targets.detach(), borders))

    def merge(self, other: TaskMetrics) -> None:
        """Takes in what another process measured on other examples."""
        self._part.add(other._part)

    def reset(self) -> None:
        """Forgets all batches."""
        self._part = Part()

    def compute(self) -> dict[str, float]:
        """Every metric over all batches; nan where it has no value (no example, one class only, constant values)."""
        if not self._part.sums:
            return dict.fromkeys(self.names, math.nan)
        loss = _ratio(float(self._part.sums["loss_sum"]), float(self._part.sums["denominator"]))
        seen = len(self._part.sums) > 2 or self._part.kept or self._kind in _LANGUAGE
        measured = self._measures.report(self._part) if seen else {}
        return {name: loss if name == "loss" else float(measured.get(name, math.nan)) for name in self.names}


def metrics_for(spec: TaskSpec) -> TaskMetrics:
    """The metrics of a task. Cheap: loads nothing."""
    return TaskMetrics(spec.kind, _MAKERS[spec.kind](spec))


# ------------------------------------------------------------------------------------------------------ classification


def _classification(spec: TaskSpec) -> _Measures:
    classes = len(spec.label_names)
    names = ("accuracy", "f1", *(("f1_positive",) if classes == 2 else ()), "mcc")
    if classes > AUROC_CLASSES:
        return _Measures(names, "accuracy", _take_classes, _report_classes)
    return _Measures((*names, "auroc"), "accuracy", _take_scores, _report_scores)


def _take_classes(outputs: Tensor, targets: Tensor, borders: Sequence[int]) -> Part:
    """outputs [E, classes] logits, targets [E] ids."""
    del borders
    classes = outputs.shape[1]
    predicted = outputs.argmax(1)
    right = targets[predicted == targets]
    names = {"hits": right, "predicted": predicted, "actual": targets}
    return Part({name: torch.bincount(ids, minlength=classes) for name, ids in names.items()})


def _take_scores(outputs: Tensor, targets: Tensor, borders: Sequence[int]) -> Part:
    part = _take_classes(outputs, targets, borders)
    # Of two classes the difference of the logits has the order of the probability without its rounding to 1.
    scores = outputs.float().softmax(1) if outputs.shape[1] != 2 else outputs[:, 1:].float() - outputs[:, :1].float()
    part.kept = {"scores": [scores.cpu()], "targets": [targets.cpu()]}
    return part


def _report_classes(part: Part) -> dict[str, float]:
    hits, predicted, actual = (part.count(name) for name in ("hits", "predicted", "actual"))
    f1 = _f1(hits, predicted, actual)
    return {
        "accuracy": _ratio(hits.sum(), actual.sum()),
        "f1": _mean_defined(f1),
        "f1_positive": f1[-1],
        "mcc": _mcc(hits, predicted, actual),
    }


def _report_scores(part: Part) -> dict[str, float]:
    scores, targets = part.joined("scores"), part.joined("targets")
    ids = [1] if scores.shape[1] == 1 else range(scores.shape[1])
    areas = [auroc(scores[:, at], targets == one) for at, one in enumerate(ids)]
    return {**_report_classes(part), "auroc": _mean_defined(np.array(areas))}


def _f1(hits: NDArray[Any], predicted: NDArray[Any], actual: NDArray[Any]) -> Floats:
    """Per class 2 hits / (predicted + actual); nan for a class that neither occurs nor is predicted."""
    total = (predicted + actual).astype(np.float64)
    return np.divide(2.0 * hits, total, out=np.full(total.shape, np.nan), where=total > 0)


def _mcc(hits: NDArray[Any], predicted: NDArray[Any], actual: NDArray[Any]) -> float:
    """Matthews' correlation for any number of classes (Gorodkin 2004, R_K), in whole numbers up to the root.

    0 where all predictions are one class, as scikit-learn has it; nan where all targets are.
    """
    right, count = int(hits.sum()), int(actual.sum())
    guesses, truths = [int(n) for n in predicted], [int(n) for n in actual]
    spread_guess = count**2 - sum(n * n for n in guesses)
    spread_truth = count**2 - sum(n * n for n in truths)
    if not spread_truth:
        return math.nan
    if not spread_guess:
        return 0.0
    together = right * count - sum(g * t for g, t in zip(guesses, truths, strict=True))
    return together / (math.sqrt(spread_guess) * math.sqrt(spread_truth))


# ---------------------------------------------------------------------------------------------------------- multilabel


def _multilabel(spec: TaskSpec) -> _Measures:
    names = ("f1_micro", "f1_macro", "exact_match")
    if len(spec.label_names) > AUROC_CLASSES:
        return _Measures(names, "f1_micro", _take_labels, _report_labels)
    return _Measures((*names, "auroc"), "f1_micro", _take_label_scores, _report_label_scores)


def _take_labels(outputs: Tensor, targets: Tensor, borders: Sequence[int]) -> Part:
    """outputs [E, classes] logits, each class on its own; targets [E, classes] of 0 and 1."""
    del borders
    predicted, actual = outputs > 0, targets > 0.5
    return Part(
        {
            "hits": (predicted & actual).sum(0),
            "predicted": predicted.sum(0),
            "actual": actual.sum(0),
            "exact": (predicted == actual).all(1).sum(),
            "examples": torch.tensor(len(targets)),
        }
    )


def _take_label_scores(outputs: Tensor, targets: Tensor, borders: Sequence[int]) -> Part:
    part = _take_labels(outputs, targets, borders)
    part.kept = {"scores": [outputs.float().cpu()], "targets": [(targets > 0.5).cpu()]}
    return part


def _report_labels(part: Part) -> dict[str, float]:
    hits, predicted, actual = (part.count(name) for name in ("hits", "predicted", "actual"))
    return {
        "f1_micro": _ratio(2 * hits.sum(), predicted.sum() + actual.sum()),
        "f1_macro": _mean_defined(_f1(hits, predicted, actual)),
        "exact_match": _ratio(part.count("exact"), part.count("examples")),
    }


def _report_label_scores(part: Part) -> dict[str, float]:
    scores, targets = part.joined("scores"), part.joined("targets") > 0
    areas = [auroc(scores[:, at], targets[:, at]) for at in range(scores.shape[1])]
    return {**_report_labels(part), "auroc": _mean_defined(np.array(areas))}


# ---------------------------------------------------------------------------------------------------------- regression


def _regression(spec: TaskSpec) -> _Measures:
    del spec
    return _Measures(("pearson", "spearman", "mae", "mse"), "mse", _take_values, _report_values)


def _take_values(outputs: Tensor, targets: Tensor, borders: Sequence[int]) -> Part:
    """outputs and targets [E]."""
    del borders
    return Part(kept={"values": [outputs.float().cpu()], "targets": [targets.float().cpu()]})


def _report_values(part: Part) -> dict[str, float]:
    values, targets = part.joined("values"), part.joined("targets")
    errors = values - targets
    return {
        "pearson": pearson(values, targets),
        "spearman": pearson(midranks(values), midranks(targets)) if comparable(values) else math.nan,
        "mae": float(np.abs(errors).mean()),
        "mse": float((errors**2).mean()),
    }


# -------------------------------------------------------------------------------------------------------------- tokens


def _tokens(spec: TaskSpec) -> _Measures:
    reader = SpanReader(spec.label_names)

    def take(outputs: Tensor, targets: Tensor, borders: Sequence[int]) -> Part:
        """outputs [P, tags] logits, targets [P] ids."""
        predicted = outputs.argmax(1).cpu()
        actual = targets.cpu()
        counts = reader.counts(predicted.tolist(), actual.tolist(), borders)
        right = int((predicted == actual).sum())
        names = ("hits", "predicted", "actual", "right", "tokens")
        return Part({n: torch.tensor(v) for n, v in zip(names, (*counts, right, len(actual)), strict=True)})

    return _Measures(("accuracy", "precision", "recall", "f1"), "f1", take, _report_tokens)


def _report_tokens(part: Part) -> dict[str, float]:
    hits, predicted, actual = (int(part.count(name)) for name in ("hits", "predicted", "actual"))
    return {
        "accuracy": _ratio(part.count("right"), part.count("tokens")),
        # Nothing found where there was something to find is a precision of 0, so that training can be seen to begin.
        "precision": hits / predicted if predicted else (0.0 if actual else math.nan),
        "recall": _ratio(hits, actual),
        "f1": _ratio(2 * hits, predicted + actual),
    }


# ------------------------------------------------------------------------------------------------------------ language


def _language(spec: TaskSpec) -> _Measures:
    del spec
    return _Measures(("perplexity",), "loss", lambda outputs, targets, borders: Part(), _report_language)


def _report_language(part: Part) -> dict[str, float]:
    loss = _ratio(float(part.sums["loss_sum"]), float(part.sums["denominator"]))
    try:
        return {"perplexity": math.exp(loss)}
    except OverflowError:
        return {"perplexity": math.inf}


_LANGUAGE = ("language_modelling", "instruction")
_MAKERS: dict[str, Callable[[TaskSpec], _Measures]] = {
    "classification": _classification,
    "multilabel_classification": _multilabel,
    "regression": _regression,
    "token_classification": _tokens,
    "language_modelling": _language,
    "instruction": _language,
}


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else math.nan


def _mean_defined(values: Floats) -> float:
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else math.nan
