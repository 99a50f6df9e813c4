"""Anyone's own module and loss as an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.data.sources import OwnBatch
from trimtab.errors import JobError

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss(module, batch)` gives one loss for each example: shape [examples]. Not their mean: then a step's loss would
depend on how it is cut into micro-batches."""

Measures = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""`measure(module, batch)` gives one value for each example and name, shape [examples]; the run reports their means."""


class OwnObjective:
    """A module with a loss per example, and measures for the evaluation."""

    def __init__(self, module: nn.Module, loss: LossFunction, measure: Measures | None = None) -> None:
        self.module = module
        self._loss = loss
        self._measure = measure
        self.measure_names: tuple[str, ...] = ()

    def loss_sum(self, batch: OwnBatch) -> Tensor:
        losses = self._loss(self.module, batch.data)
        _check_per_example(losses, batch.examples, "loss")
        return losses.float().sum()

    def evaluate(self, batch: OwnBatch) -> tuple[Tensor, Tensor]:
        """Outputs are [examples, measures], in the order of `measure_names`."""
        loss = self.loss_sum(batch)
        if self._measure is None:
            return loss, loss.new_zeros(batch.examples, 0)
        measured = self._measure(self.module, batch.data)
        for name, values in measured.items():
            _check_per_example(values, batch.examples, f"measure {name!r}")
        self.measure_names = tuple(measured)
        return loss, torch.stack([values.float() for values in measured.values()], dim=1)


def _check_per_example(values: Any, examples: int, what: str) -> None:
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape != (examples,):
        raise JobError(
            f"the {what} function returned {shape} for {examples} examples; one value for each is needed, shape "
            f"({examples},).",
            cure="Return the values before the mean, for instance with reduction='none'.",
        )
