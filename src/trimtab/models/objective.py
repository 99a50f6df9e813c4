"""What training and evaluation ask of a model: the sum of a loss over a micro-batch, and outputs for the metrics."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn


class Objective(Protocol):
    """A model with its task. The loop knows no more of a model than this.

    `batch` is whatever the data side makes (`trimtab.data.batches.Batch` for text tasks, anything for a user's own).
    """

    module: nn.Module
    """Holds every parameter, trained and frozen."""

    def loss_sum(self, batch: Any) -> Tensor:
        """Sum (not mean) of the weighted losses of the micro-batch's targets: a float32 scalar with a graph."""
        ...

    def evaluate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Without a graph: (loss_sum float32 scalar, outputs).

        Outputs are what the task's metrics need and no more: logits [E, classes], values [E], logits at target
        positions [P, tags]; for language modelling an empty tensor, since loss and perplexity need no logits.
        """
        ...
