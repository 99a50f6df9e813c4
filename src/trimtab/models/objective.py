"""What training and evaluation ask of a model: the sum of a loss over a micro-batch, and outputs for the metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.data.batches import Batch, Layout
from trimtab.data.task import LANGUAGE_KINDS, TaskSpec
from trimtab.errors import ModelError
from trimtab.kernels.cross_entropy import CrossEntropySettings, linear_cross_entropy
from trimtab.kernels.dropout import use_fast_dropout, use_torch_dropout
from trimtab.kernels.norms import use_fast_norms, use_own_norms
from trimtab.models.packed import find_parts
from trimtab.models.selfcheck import Chosen, choose_layout


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


class TextObjective:
    """A transformers model with one of the six text tasks, in either layout. `build_objective` makes it.

    The unit of the loss: one example for whole-text tasks, one target token for the others. For several labels at once
    an example's loss is the mean over its classes.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: TaskSpec,
        chosen: Chosen,
        *,
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        self.module = module
        self.spec = spec
        self.reason = chosen.reason
        """Why this layout, in one sentence for the user."""
        self._runner = chosen.runner
        self._scaling = chosen.scaling
        self._smoothing = label_smoothing
        self._class_weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self._loss = _LOSSES.get(spec.kind, _class_losses)

    @property
    def layout(self) -> Layout:
        """The layout that its batches must have."""
        return self._runner.layout

    def loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the weighted losses of the batch's targets: a float32 scalar with a graph."""
        return self._loss_sum(batch, self._smoothing)

    def _loss_sum(self, batch: Batch, smoothing: float) -> Tensor:
        if self.spec.kind in LANGUAGE_KINDS and self._scaling is not None:
            return self._language_loss(batch, smoothing)
        return self._sum(self._runner.logits(batch).float(), batch, smoothing)

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(loss_sum, outputs), without a graph; see `Objective.evaluate`. The caller sets evaluation mode.

        Without label smoothing: a loss that is measured, and the perplexity made of it, is that of the real targets.
        """
        with torch.no_grad():
            if self.spec.kind in LANGUAGE_KINDS:
                return self._loss_sum(batch, 0.0), torch.empty(0)
            logits = self._runner.logits(batch).float()
            outputs = logits.squeeze(-1) if self.spec.kind == "regression" else logits
            return self._sum(logits, batch, 0.0), outputs

    def release(self) -> None:
        """Gives the model back as it was: its own attention, dropout and norms, no hooks. Ends the objective."""
        self._runner.close()
        use_torch_dropout(self.module)
        use_own_norms(self.module)

    def _language_loss(self, batch: Batch, smoothing: float) -> Tensor:
        head = self._runner.parts.head
        assert isinstance(head, nn.Linear) and self._scaling is not None
        settings = CrossEntropySettings(label_smoothing=smoothing, scaling=self._scaling)
        hidden = self._runner.hidden(batch)
        weights = batch.row_weights
        return linear_cross_entropy(
            hidden, head.weight, head.bias, batch.targets, row_weights=weights, settings=settings
        )

    def _sum(self, logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
        losses = self._loss(logits, batch.targets, smoothing, self._class_weights)
        return losses.sum() if batch.row_weights is None else (losses * batch.row_weights).sum()


def _class_losses(logits: Tensor, targets: Tensor, smoothing: float, _weights: Tensor | None) -> Tensor:
    """[rows]. Class weights come as row weights: with smoothing too, a row weighs what its own class weighs."""
    return functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def _label_losses(logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
    """[rows]: mean over classes of the binary cross-entropies, each times its class's weight; smoothing moves 0 and 1
    towards one half."""
    smoothed = targets * (1 - smoothing) + smoothing / 2 if smoothing else targets
    weights = None if weights is None else weights.to(logits.device)
    losses = functional.binary_cross_entropy_with_logits(logits, smoothed, weight=weights, reduction="none")
    return losses.mean(1)


def _squared_errors(logits: Tensor, targets: Tensor, _smoothing: float, _weights: Tensor | None) -> Tensor:
    return (logits.squeeze(-1) - targets) ** 2


_LOSSES: dict[str, Callable[[Tensor, Tensor, float, Tensor | None], Tensor]] = {
    "multilabel_classification": _label_losses,
    "regression": _squared_errors,
}


def build_objective(
    model: nn.Module,
    spec: TaskSpec,
    *,
    layout: Layout,
    pad_id: int,
    class_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    longest: int | None = None,
) -> TextObjective:
    """The objective of a model that `trimtab.models.load` made, with or without adapters, on the device it will run on.

    `layout` is the wish: when the self-check finds that the model cannot run flat, the objective is padded and
    `reason` says why. `longest`: tokens of the longest example, if known.
    `class_weights` (one per class) weigh the labels of multilabel tasks here; for the other tasks `collate` has put
    them into the batch's row weights.
    """
    parts = find_parts(model)
    if parts is None:
        raise ModelError(
            f"{type(model).__name__} is not a transformers model with a body and a head.",
            cure="Use trimtab.Trainer with a loss of your own for it.",
        )
    chosen = choose_layout(parts, spec.kind, layout, pad_id=pad_id, longest=longest)
    if next(model.parameters()).device.type == "cpu":
        use_fast_dropout(model)
        use_fast_norms(model)
    return TextObjective(model, spec, chosen, class_weights=class_weights, label_smoothing=label_smoothing)
