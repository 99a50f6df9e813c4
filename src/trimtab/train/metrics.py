"""Metrics of a task, streamed over micro-batches and exact over the whole set. The only import of torchmetrics.

Counts are kept as whole numbers and sums in float64, so the cut into micro-batches changes nothing. A metric that the
data leaves undefined (AUROC of one class, a correlation with constant values) is nan. So is every metric of the
outputs once one of them is not finite: a broken model must not win by an accident of ordering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trimtab.data.task import TaskSpec
from trimtab.errors import JobError, did_you_mean
from trimtab.train.counts import ClassCounts, ratio
from trimtab.train.spans import SpanCounts, read_tags

AUROC_CLASSES = 256
"""AUROC needs every score of every class: 1 KiB an example with 256 classes. It is left out with more."""

_LOWER_IS_BETTER = frozenset({"loss", "perplexity", "mae", "mse"})
_DEFAULT_BEST = {
    "classification": "accuracy",
    "multilabel_classification": "f1_micro",
    "token_classification": "f1",
}
_NAN = math.nan


class Measure(Protocol):
    """The metrics of one kind of output, all but the loss."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def update(self, outputs: Tensor, targets: Tensor, sequences: Sequence[int] | None) -> None:
        """Adds a micro-batch, on whatever device it lies."""
        ...

    def compute(self) -> dict[str, float]:
        """One value for each name."""
        ...


class TaskMetrics:
    """Loss and metrics of one evaluation. `metrics_for` makes it."""

    def __init__(self, spec: TaskSpec, make: Callable[[], Measure]) -> None:
        self._kind = spec.kind
        self._make = make
        self.reset()
        self.names: tuple[str, ...] = ("loss", *self._measure.names)
        """What `compute` returns, in its order."""
        self.default_best: str = _DEFAULT_BEST.get(spec.kind, "loss")
        """The metric that picks the best checkpoint unless the job says otherwise."""

    def reset(self) -> None:
        """Forgets all updates."""
        self._measure = self._make()
        self._loss_sum, self._denominator, self._finite = 0.0, 0.0, True

    def update(
        self,
        outputs: Tensor,
        targets: Tensor,
        loss_sum: float | Tensor,
        denominator: float,
        *,
        sequences: Sequence[int] | None = None,
    ) -> None:
        """Adds a micro-batch: `outputs` and `targets` as `Objective.evaluate` and `Batch` have them.

        `denominator` is the number of targets in `loss_sum`, or the sum of their weights. `sequences` (token
        classification only): how many of the targets belong to each example, in their order; spans end there.
        """
        self._loss_sum += float(loss_sum)
        self._denominator += denominator
        self._finite = self._finite and bool(torch.isfinite(outputs).all())
        if self._finite:
            self._measure.update(outputs.detach(), targets, sequences)

    def compute(self) -> dict[str, float]:
        """Every metric by name, over all updates since the last reset."""
        loss = ratio(self._loss_sum, self._denominator)
        values = self._measure.compute() if self._finite else dict.fromkeys(self._measure.names, _NAN)
        if "perplexity" in values:
            values["perplexity"] = _exp(loss)
        return {"loss": loss, **values}

    def higher_is_better(self, name: str) -> bool:
        """Whether more of the metric is better."""
        return self.check_name(name) not in _LOWER_IS_BETTER

    def check_name(self, name: str) -> str:
        """`name`, if the task has this metric.

        Raises:
            JobError: it has not; the nearest name is given.
        """
        if name not in self.names:
            raise JobError(
                f"training.best_metric is '{name}', which is not measured for {self._kind}.",
                cure=did_you_mean(name, self.names),
            )
        return name


def metrics_for(spec: TaskSpec) -> TaskMetrics:
    """The metrics of a task. Cheap: torchmetrics is imported when a regression's metrics are computed."""
    names = spec.label_names
    makers: dict[str, Callable[[], Measure]] = {
        "classification": lambda: _Classes(len(names)),
        "multilabel_classification": lambda: _Labels(len(names)),
        "regression": _Values,
        "token_classification": lambda: _Tags(names),
    }
    return TaskMetrics(spec, makers.get(spec.kind, _Perplexity))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


class _Perplexity:
    """Language tasks: all there is follows from the loss."""

    names = ("perplexity",)

    def update(self, outputs: Tensor, targets: Tensor, sequences: Sequence[int] | None) -> None:
        """Nothing to keep."""

    def compute(self) -> dict[str, float]:
        return {"perplexity": _NAN}


@dataclass
class _Kept:
    """Rows that a metric needs all at once, on the host."""

    parts: list[tuple[Tensor, Tensor]]

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        self.parts.append((outputs.cpu(), targets.cpu()))

    def whole(self) -> tuple[Tensor, Tensor]:
        """All outputs, all targets. There must be some."""
        outputs, targets = zip(*self.parts, strict=True)
        return torch.cat(outputs), torch.cat(targets)


class _Classes:
    """One class of several: accuracy, macro F1, MCC, macro one-against-rest AUROC.

    Macro F1 is over the classes that are there or predicted; `f1_positive`, with two classes, is that of the second.
    """

    def __init__(self, classes: int) -> None:
        self._counts = ClassCounts(classes)
        self._kept = _Kept([]) if classes <= AUROC_CLASSES else None
        positive = ("f1_positive",) if classes == 2 else ()
        auroc = () if self._kept is None else ("auroc",)
        self.names = ("accuracy", "f1", *positive, "mcc", *auroc)

    def update(self, outputs: Tensor, targets: Tensor, sequences: Sequence[int] | None) -> None:
        del sequences
        logits, targets = outputs.cpu(), targets.cpu()
        self._counts.add_ids(logits.argmax(1), targets)
        if self._kept is not None:
            self._kept.add(logits, targets)

    def compute(self) -> dict[str, float]:
        f1 = self._counts.f1()
        values = {"accuracy": self._counts.accuracy(), "f1": float(f1.nanmean()), "mcc": self._counts.mcc()}
        if "f1_positive" in self.names:
            values["f1_positive"] = float(f1[1])
        if self._kept is not None:
            values["auroc"] = self._auroc(self._kept)
        return {name: values[name] for name in self.names}

    def _auroc(self, kept: _Kept) -> float:
        if not kept.parts:
            return _NAN
        logits, targets = kept.whole()
        log_odds = _log_odds(logits.double())
        return _mean([_auroc(log_odds[:, c], targets == c) for c in range(logits.shape[1])])


class _Labels:
    """Several labels at once: micro and macro F1, macro AUROC, and the share of examples with every label right.

    A label that is never there nor predicted counts as 0 in the macro F1, as in scikit-learn.
    """

    def __init__(self, labels: int) -> None:
        self._counts = ClassCounts(labels)
        self._kept = _Kept([]) if labels <= AUROC_CLASSES else None
        self._exact, self._rows = 0, 0
        self.names = ("f1_micro", "f1_macro", "exact_match", *(() if self._kept is None else ("auroc",)))

    def update(self, outputs: Tensor, targets: Tensor, sequences: Sequence[int] | None) -> None:
        del sequences
        logits, flags = outputs.cpu(), targets.cpu() > 0.5
        predicted = logits > 0
        self._counts.add_flags(predicted, flags)
        self._exact += int((predicted == flags).all(1).sum())
        self._rows += len(flags)
        if self._kept is not None:
            self._kept.add(logits, flags)

    def compute(self) -> dict[str, float]:
        counts = self._counts
        seen = int((counts.predicted + counts.actual).sum())
        values = {
            "f1_micro": ratio(2 * int(counts.right.sum()), seen),
            "f1_macro": float(counts.f1().nan_to_num(0.0).mean()) if seen else _NAN,
            "exact_match": ratio(self._exact, self._rows),
        }
        if self._kept is not None:
            values["auroc"] = self._auroc(self._kept)
        return values

    def _auroc(self, kept: _Kept) -> float:
        if not kept.parts:
            return _NAN
        logits, flags = kept.whole()
        return _mean([_auroc(logits[:, c].double(), flags[:, c]) for c in range(logits.shape[1])])


class _Values:
    """A number for each example: correlations and errors."""

    names = ("pearson", "spearman", "mae", "mse")

    def __init__(self) -> None:
        self._kept = _Kept([])

    def update(self, outputs: Tensor, targets: Tensor, sequences: Sequence[int] | None) -> None:
        del sequences
        self._kept.add(outputs, targets)

    def compute(self) -> dict[str, float]:
        if not self._kept.parts:
            return dict.fromkeys(self.names, _NAN)
        from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error

        predicted, actual = (values.double() for values in self._kept.whole())
        return {
            "pearson": _pearson(predicted, actual),
            "spearman": _pearson(_average_ranks(predicted), _average_ranks(actual)),
            "mae": float(mean_absolute_error(predicted, actual)),
            "mse": float(mean_squared_error(predicted, actual)),
        }


class _Tags:
    """A tag for each word: accuracy over words; precision, recall and F1 over spans."""

    names = ("accuracy", "precision", "recall", "f1")

    def __init__(self, names: Sequence[str]) -> None:
        self._tags = read_tags(names)
        self._spans = SpanCounts()
        self._right, self._total = 0, 0

    def update(self, outputs: Tensor, targets: Tensor, sequences: Sequence[int] | None) -> None:
        predicted, actual = outputs.argmax(-1).tolist(), targets.tolist()
        self._right += sum(p == a for p, a in zip(predicted, actual, strict=True))
        self._total += len(actual)
        start = 0
        for count in [len(actual)] if sequences is None else sequences:
            part = slice(start, start + count)
            self._spans.add((self._tags[i] for i in predicted[part]), (self._tags[i] for i in actual[part]))
            start += count
        assert start == len(actual), "sequences must add up to the targets"

    def compute(self) -> dict[str, float]:
        return {"accuracy": ratio(self._right, self._total), **self._spans.rates()}


def _log_odds(logits: Tensor) -> Tensor:
    """[rows, classes] log(p / (1 - p)) of the softmax, without the ties that rounding makes where p is near 1."""
    top, best = logits.max(1)
    others = logits.scatter(1, best[:, None], -torch.inf).logsumexp(1)
    log_p = logits - torch.logaddexp(top, others)[:, None]
    # Where p is at most a half, 1 - p is exact enough; the best class has its own formula.
    odds = log_p - torch.log1p(-log_p.exp().clamp(max=0.5))
    return odds.scatter(1, best[:, None], (top - others)[:, None])


def _auroc(scores: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve; nan unless there are both positives and negatives.

    It is the share of pairs whose positive has the higher score, ties counting half (Mann and Whitney), so it follows
    from ranks exactly. torchmetrics rounds it to float32, ties large scores by a sigmoid, and takes 1.2 s to import.
    """
    positives = int(positive.sum())
    pairs = positives * (len(positive) - positives)
    above = float(_average_ranks(scores)[positive].sum()) - positives * (positives + 1) / 2
    return ratio(above, pairs)


def _average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1).double() / 2)[inverse]


def _pearson(first: Tensor, second: Tensor) -> float:
    """Correlation of two float64 vectors; nan where one of them is constant."""
    if not all(bool((values != values[0]).any()) for values in (first, second)):
        return _NAN
    from torchmetrics.functional.regression import pearson_corrcoef

    return float(pearson_corrcoef(_standard(first), _standard(second)))


def _standard(values: Tensor) -> Tensor:
    centred = values - values.mean()
    return centred / centred.square().mean().sqrt()


def _mean(values: Sequence[float]) -> float:
    """Mean of the values that are defined."""
    known = [value for value in values if not math.isnan(value)]
    return ratio(sum(known), len(known))
