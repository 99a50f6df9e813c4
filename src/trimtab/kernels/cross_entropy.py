"""Cross-entropy of a linear head without ever holding its logits.

For a vocabulary of 150,000 the logits of 2,000 tokens take 1.2 GB, and their gradient as much again. Here the head runs
on a few hundred rows at a time. Each chunk's loss, its gradient to the hidden states and its share of the weight's
gradient are made in the forward, where the logits are at hand, and the chunk is forgotten; the backward only scales.
Inside a chunk the softmax walks over a few rows that stay in the processor's cache and leaves their gradient in the
place of the logits: on a CPU reading memory is what costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 31 << 20
"""Logits held at once. From 32 MiB on glibc maps fresh pages for each tensor, which doubles the time of the product."""
_CACHE_BYTES = 1 << 20
"""Float32 logits in work at once on a CPU: half of a core's second cache."""
_LOWEST = -69.0
"""Floor of a logit below the largest of its row: its exponential adds at most 1e-30 to a probability, and smaller ones
would be denormals, which slow a CPU's float32 products tenfold."""
_FP16_LIFT = 256.0
"""The loss scale of fp16 comes only with the backward, so small probabilities are lifted in the forward already."""


@dataclass(frozen=True)
class HeadScaling:
    """What a model does to its head's linear output: times `factor`, then `cap * tanh(logits / cap)`."""

    factor: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def slope(self, scaled: Tensor) -> Tensor | None:
        """Derivative of `apply` where it gave `scaled`; None where it is 1 everywhere."""
        if self.cap is not None:
            return self.factor * (1 - (scaled / self.cap) ** 2)
        return None if self.factor == 1.0 else scaled.new_tensor(self.factor)


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
            rows = max(1, settings.chunk_bytes // (kind.itemsize * weight.shape[0]))
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
        self.lift = _FP16_LIFT if kind == torch.float16 else 1.0
        wide = torch.float32 if kind == torch.float16 else None
        self.hidden_grad = torch.empty_like(hidden, dtype=wide) if needs[0] else None
        self.weight_grad = torch.empty_like(weight, dtype=wide) if needs[1] else None
        self.bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None
        self.wanted = any(needs)
        if self.weight_grad is not None and not len(hidden):
            self.weight_grad.zero_()

    def gradients(self) -> tuple[tuple[Tensor | None, torch.dtype], ...]:
        """Of hidden states, weight and bias, each with the type it must leave in."""
        return tuple(zip((self.hidden_grad, self.weight_grad, self.bias_grad), self.kinds, strict=True))

    def add(self, part: slice, targets: Tensor, weights: Tensor | None, settings: CrossEntropySettings) -> None:
        """Adds the rows `part` of the hidden states."""
        hidden = self.hidden[part].to(self.weight.dtype)
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        on_cpu = logits.device.type == "cpu"
        rows = max(1, _CACHE_BYTES // (4 * logits.shape[1])) if on_cpu else max(1, len(logits))
        for start in range(0, len(logits), rows):
            few = slice(start, start + rows)
            self._softmax(logits[few], targets[few], None if weights is None else weights[few], settings)
        if self.wanted:
            self._spread(part, hidden, logits)

    def _softmax(self, logits: Tensor, targets: Tensor, weights: Tensor | None, settings: CrossEntropySettings) -> None:
        """Adds the losses of a few rows and puts the gradient of their logits, times `lift`, into their place."""
        smoothing = settings.label_smoothing
        work = settings.scaling.apply(logits.float())
        slope = settings.scaling.slope(work) if self.wanted else None
        work -= work.amax(1, keepdim=True)
        losses = (smoothing - 1) * work.gather(1, targets[:, None])
        if smoothing:
            losses -= smoothing * work.mean(1, keepdim=True)
        sums = work.clamp_(min=_LOWEST).exp_().sum(1, keepdim=True)
        losses += sums.log()
        row_weights = torch.ones_like(losses) if weights is None else weights[:, None]
        self.loss += (losses * row_weights).sum()
        if not self.wanted:
            return
        row_weights = row_weights * self.lift
        work *= row_weights / sums
        if smoothing:
            work -= row_weights * (smoothing / work.shape[1])
        work.scatter_add_(1, targets[:, None], row_weights * (smoothing - 1))
        logits.copy_(work if slope is None else work.mul_(slope))

    def _spread(self, part: slice, hidden: Tensor, gradient: Tensor) -> None:
        """From the gradient of a chunk's logits to those of its inputs."""
        if self.bias_grad is not None:
            self.bias_grad += gradient.sum(0, dtype=torch.float32) / self.lift
        if self.hidden_grad is not None:
            self.hidden_grad[part] = (gradient @ self.weight).to(self.hidden_grad.dtype) / self.lift
        if self.weight_grad is None:
            return
        first = part.start == 0
        if self.weight_grad.dtype == gradient.dtype:
            torch.addmm(self.weight_grad, gradient.t(), hidden, beta=0 if first else 1, out=self.weight_grad)
            return
        share = (gradient.t() @ hidden).to(self.weight_grad.dtype) / self.lift
        self.weight_grad = share if first else self.weight_grad.add_(share)
