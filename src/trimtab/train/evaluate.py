"""Evaluation over a whole set, in one pass, with nothing kept that the metrics do not need."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from trimtab.data.batches import Batch
from trimtab.data.sources import OwnBatch
from trimtab.data.task import TaskSpec
from trimtab.errors import Interrupted, JobError
from trimtab.models.objective import Objective
from trimtab.models.own import OwnObjective
from trimtab.train.metrics import metrics_for

Stop = Callable[[], bool]
_Batch = TypeVar("_Batch")


def evaluate(
    objective: Objective, batches: Iterable[Batch], spec: TaskSpec, *, stop: Stop | None = None
) -> dict[str, float]:
    """The metrics of a task over all batches; see `trimtab.train.metrics`.

    The loss is the sum over all targets, times their weights, over the sum of these weights. `stop` is asked between
    batches.

    Raises:
        Interrupted: `stop` said so; a part of a set has no metrics.
    """
    metrics = metrics_for(spec)
    with evaluation_mode(objective.module), torch.no_grad():
        for batch in heeding(batches, stop):
            loss, outputs = objective.evaluate(batch)
            weights = batch.row_weights
            denominator = float(batch.target_tokens if weights is None else weights.double().sum())
            borders = targets_per_example(batch) if spec.kind == "token_classification" else None
            metrics.update(outputs, batch.targets, loss, denominator, targets_per_example=borders)
    return metrics.compute()


def evaluate_own(objective: OwnObjective, batches: Iterable[OwnBatch], *, stop: Stop | None = None) -> dict[str, float]:
    """Mean loss and means of the measures of a user's own module, each example counted once.

    Raises:
        Interrupted: `stop` said so.
        JobError: a measure is named `loss`, or the measures differ between batches.
    """
    totals: Tensor | None = None
    names: tuple[str, ...] = ()
    examples = 0
    with evaluation_mode(objective.module), torch.no_grad():
        for batch in heeding(batches, stop):
            loss, outputs = objective.evaluate(batch)
            names = _same_names(names if examples else objective.measure_names, objective.measure_names)
            sums = torch.cat([loss.double().reshape(1), outputs.double().sum(0)])
            totals = sums if totals is None else totals + sums
            examples += batch.examples
    if totals is None:
        return {"loss": math.nan}
    return dict(zip(("loss", *names), (totals / examples).tolist(), strict=True))


def _same_names(before: tuple[str, ...], now: tuple[str, ...]) -> tuple[str, ...]:
    if "loss" in now:
        raise JobError("a measure is named 'loss', as the loss itself is.", cure="Give the measure another name.")
    if before != now:
        raise JobError(
            f"the measure function gave {', '.join(now)} for one batch and {', '.join(before)} for another.",
            cure="Return the same names for every batch.",
        )
    return now


def heeding(batches: Iterable[_Batch], stop: Stop | None) -> Iterator[_Batch]:
    """The batches, until `stop` says so, which is Interrupted."""
    for batch in batches:
        if stop is not None and stop():
            raise Interrupted("stopped during an evaluation; it has no result.", cure="Start the evaluation again.")
        yield batch


def targets_per_example(batch: Batch) -> list[int]:
    """[E] how many of the batch's targets belong to each example, for tasks with targets at tokens."""
    assert batch.target_positions is not None
    positions = batch.target_positions.cpu()
    if batch.layout == "padded":
        rows = positions // batch.input_ids.shape[1]
    else:
        ends = torch.tensor(batch.lengths).cumsum(0)
        rows = torch.bucketize(positions, ends, right=True)
    return torch.bincount(rows, minlength=batch.examples).tolist()


@contextmanager
def evaluation_mode(module: nn.Module) -> Generator[None]:
    """Evaluation mode within; afterwards each module is in the mode in which it was, also after an error."""
    before = [(part, part.training) for part in module.modules()]
    training = module.training
    module.eval()
    try:
        yield
    finally:
        # By the module's own `train`, which may do more than set a flag; then those that differed from their parent.
        module.train(training)
        for part, mode in before:
            part.training = mode
