"""Cross-entropy of a linear head without ever holding its logits.

For a vocabulary of 150,000 the logits of 2,000 tokens take 1.2 GB, and their gradient as much again. Here the head runs
on a few rows at a time; each chunk's loss, its gradient to the hidden states and its share of the weight's gradient are
made in the forward, where the logits are at hand, and the chunk is forgotten. The backward only scales them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Logits held at once, as float32."""
_LOG_FLOOR = -69.0
_FP16_LIFT = 256.0


@dataclass(frozen=True)
class HeadScaling:
    """What a model does to its head's linear output: times `factor`, then `cap * tanh(logits / cap)`."""

    factor: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def slope_(self, gradient: Tensor, scaled: Tensor) -> Tensor:
        """Gradient to the linear output from that to the `scaled` logits, in place."""
        if self.cap is not None:
            gradient.mul_(1 - (scaled / self.cap) ** 2)
        return gradient if self.factor == 1.0 else gradient.mul_(self.factor)


@dataclass(frozen=True)
class CrossEntropySettings:
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes (Szegedy et al. 2016)."""
    scaling: HeadScaling = HeadScaling()
    chunk_bytes: int = CHUNK_BYTES


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    row_weights: Tensor | None = None,
    settings: CrossEntropySettings = CrossEntropySettings(),
) -> Tensor:
    """Sum of the cross-entropies of `hidden @ weight.T + bias` against `targets`: a float32 scalar.

    hidden [P, H], weight [V, H], bias [V] or None, targets [P] int64, row_weights [P] float32 or None. Softmax and sums
    are float32 whatever the inputs; the products run in the hidden states' type, or in autocast's. A second derivative
    does not exist.
    """
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss = _LinearCrossEntropy.apply(hidden, weight, bias, targets, row_weights, settings)
    assert isinstance(loss, Tensor)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        row_weights: Tensor | None,
        settings: CrossEntropySettings,
    ) -> Tensor:
        device = hidden.device.type
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            sums = _Sums(hidden, weight, bias, kind, tuple(ctx.needs_input_grad))
            rows = max(1, settings.chunk_bytes // (4 * weight.shape[0]))
            for start in range(0, hidden.shape[0], rows):
                part = slice(start, start + rows)
                weights = None if row_weights is None else row_weights[part]
                sums.add(part, targets[part], weights, settings)
        ctx.gradients = sums.gradients()
        return sums.loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Scaled in place and given away: a second backward through the same graph has nothing left, and says so.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("The gradients of linear_cross_entropy were already used: its graph runs backward once")
        scaled = (None if grad is None else grad.mul_(upstream).to(kind) for grad, kind in gradients)
        return (*scaled, None, None, None)


class _Sums:
    """Loss and gradients of the chunks so far."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype, needs: tuple[bool, ...]
    ) -> None:
        self.hidden, self.weight = hidden, weight.to(kind)
        self.bias = None if bias is None else bias.to(kind)
        self.kinds = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        self.loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # The loss scale of fp16 comes only with the backward, so small probabilities are lifted here already.
        self.lift = _FP16_LIFT if kind == torch.float16 else 1.0
        wide = torch.float32 if kind == torch.float16 else None
        self.hidden_grad = torch.empty_like(hidden, dtype=wide) if needs[0] else None
        self.weight_grad = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        self.bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None

    def gradients(self) -> tuple[tuple[Tensor | None, torch.dtype], ...]:
        """Of hidden states, weight and bias, each with the type it must leave in."""
        return tuple(zip((self.hidden_grad, self.weight_grad, self.bias_grad), self.kinds, strict=True))

    def add(self, part: slice, targets: Tensor, weights: Tensor | None, settings: CrossEntropySettings) -> None:
        """Adds the rows `part` of the hidden states."""
        hidden = self.hidden[part].to(self.weight.dtype)
        logits = settings.scaling.apply(torch.nn.functional.linear(hidden, self.weight, self.bias).float())
        log_probabilities = torch.log_softmax(logits, 1)
        smoothing = settings.label_smoothing
        losses = (smoothing - 1) * log_probabilities.gather(1, targets[:, None])[:, 0]
        if smoothing:
            losses -= smoothing * log_probabilities.mean(1)
        self.loss += (losses if weights is None else losses * weights).sum()
        if all(grad is None for grad, _ in self.gradients()):
            return
        # The floor keeps denormals out, which slow a CPU's products tenfold; it adds at most 1e-30 to a probability.
        gradient = log_probabilities.clamp_(min=_LOG_FLOOR).exp_()
        if smoothing:
            gradient -= smoothing / gradient.shape[1]
        gradient.scatter_add_(1, targets[:, None], gradient.new_full((len(targets), 1), smoothing - 1))
        if weights is not None:
            gradient *= weights[:, None]
        self._spread(part, hidden, settings.scaling.slope_(gradient, logits))

    def _spread(self, part: slice, hidden: Tensor, gradient: Tensor) -> None:
        """From the gradient of a chunk's logits to those of its inputs."""
        if self.bias_grad is not None:
            self.bias_grad += gradient.sum(0)
        narrow = (gradient if self.lift == 1.0 else gradient * self.lift).to(self.weight.dtype)
        if self.hidden_grad is not None:
            self.hidden_grad[part] = (narrow @ self.weight).to(self.hidden_grad.dtype) / self.lift
        if self.weight_grad is None:
            return
        if self.weight_grad.dtype == narrow.dtype:
            torch.addmm(self.weight_grad, narrow.t(), hidden, out=self.weight_grad)
        else:
            self.weight_grad += (narrow.t() @ hidden).to(self.weight_grad.dtype) / self.lift
