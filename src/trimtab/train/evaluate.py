"""Measures a model on held-out data: streaming, without gradients, and with the model left as it was."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from trimtab.data.batches import Batch
from trimtab.data.sources import OwnBatch
from trimtab.data.task import TaskSpec
from trimtab.errors import JobError
from trimtab.models.objective import Objective
from trimtab.models.own import OwnObjective
from trimtab.train.counts import ratio
from trimtab.train.metrics import metrics_for


@contextmanager
def evaluation_mode(module: nn.Module) -> Generator[None, None, None]:
    """Evaluation mode without gradients; afterwards each module is in the mode that it was in, also on errors."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in before:
            part.training = training


def evaluate(
    objective: Objective,
    batches: Iterable[Batch],
    spec: TaskSpec,
) -> dict[str, float]:
    """Loss and metrics of the task over all batches, by name.

    The loss is the weighted sum over all targets divided by the sum of their weights, however the set is cut.
    """
    metrics = metrics_for(spec)
    with evaluation_mode(objective.module):
        for batch in batches:
            loss_sum, outputs = objective.evaluate(batch)
            metrics.update(outputs, batch.targets, loss_sum, denominator(batch), sequences=_sequences(batch, spec))
    return metrics.compute()


def denominator(batch: Batch) -> float:
    """Sum of the weights of a batch's targets."""
    return float(batch.target_tokens) if batch.row_weights is None else float(batch.row_weights.cpu().double().sum())


def _sequences(batch: Batch, spec: TaskSpec) -> Sequence[int] | None:
    return targets_per_example(batch) if spec.kind == "token_classification" else None


def targets_per_example(batch: Batch) -> list[int]:
    """Of a per-token task: how many targets each example has, in the order of the examples."""
    assert batch.target_positions is not None
    positions = batch.target_positions.cpu()
    width = batch.input_ids.shape[1]
    lengths = torch.tensor(batch.lengths)
    ends = lengths.cumsum(0) if batch.layout == "flat" else torch.arange(1, batch.examples + 1) * width
    owners = torch.bucketize(positions, ends, right=True)
    return torch.bincount(owners, minlength=batch.examples).tolist()


def evaluate_own(objective: OwnObjective, batches: Iterable[OwnBatch]) -> dict[str, float]:
    """Mean loss and means of the measures over all examples of a user's own data, by name.

    Raises:
        JobError: a measure is called `loss`, or the measures' names differ between batches.
    """
    examples, loss_sum = 0, 0.0
    sums: dict[str, float] | None = None
    with evaluation_mode(objective.module):
        for batch in batches:
            loss, outputs = objective.evaluate(batch)
            sums = _add(sums, objective.measure_names, outputs.cpu().double().sum(0).tolist())
            examples, loss_sum = examples + batch.examples, loss_sum + float(loss)
    return {"loss": ratio(loss_sum, examples), **{name: ratio(value, examples) for name, value in (sums or {}).items()}}


def _add(sums: dict[str, float] | None, names: Sequence[str], values: list[float]) -> dict[str, float]:
    if "loss" in names:
        raise JobError(
            "the measure function names one of its values 'loss', which is the name of the loss itself.",
            cure="Give it another name.",
        )
    if sums is None:
        return dict(zip(names, values, strict=True))
    if set(names) != set(sums):
        raise JobError(
            f"the measure function returned {', '.join(names) or 'nothing'} for one batch and "
            f"{', '.join(sums) or 'nothing'} for another.",
            cure="Return the same names for every batch.",
        )
    added = dict(zip(names, values, strict=True))
    return {name: value + added[name] for name, value in sums.items()}
