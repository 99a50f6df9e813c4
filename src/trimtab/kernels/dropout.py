"""Dropout from cheap random bits, for CPUs.

`torch.nn.functional.dropout` spends 5 ns an element on a CPU (its Bernoulli generator is serial and its masks are
bools, which the vector units dislike): a fifth of an encoder's training step. Here one byte of a fast generator
decides an element, and the mask is a tensor of the input's own width, 0 or 1 / (1 - p), that multiplies it: 0.4 ns.

A byte knows only multiples of 1/256. So each call draws its threshold, one of the two nearest to `256 p` with odds
that make the mean rate exactly p, and scales by that threshold's own keep rate: every call is unbiased, and over calls
the rate is p. Rates that a byte holds badly (below 1/16, above 3/4) use two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_BYTE_RATES = (1 / 16, 3 / 4)
_CARRIERS = {2: torch.int16, 4: torch.int32}
"""Integer of the same width as a float, for arithmetic on its bits."""


def draw_seed() -> int:
    """63 bits from torch's CPU generator: what follows from them is a function of `torch.manual_seed`."""
    return int(torch.randint(0, 2**63 - 1, ()))


@dataclass(frozen=True)
class Rate:
    """A drop rate as a threshold on random words."""

    word: torch.dtype
    """uint8 or int16."""
    threshold: int
    """Words below it are dropped."""
    scale: float
    """One over the keep rate."""


class BitStream:
    """Random words from one seed; the same seed gives the same words in the same order on every machine."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.SFC64(seed)

    def rate(self, p: float) -> Rate:
        """The threshold of a call, drawn so that the mean rate is `p`."""
        levels = 256 if _BYTE_RATES[0] <= p <= _BYTE_RATES[1] else 65536
        exact = p * levels
        low = math.floor(exact)
        uniform = int(self._source.random_raw()) / 2.0**64
        dropped = min(low + (uniform < exact - low), levels - 1)
        scale = levels / (levels - dropped)
        if levels == 256:
            return Rate(torch.uint8, dropped, scale)
        return Rate(torch.int16, dropped - 32768, scale)

    def keep(self, shape: tuple[int, ...], rate: Rate, dtype: torch.dtype) -> Tensor:
        """`shape` of integers as wide as `dtype`: 1 where the element stays, else 0."""
        count = math.prod(shape)
        bytes_needed = count * (1 if rate.word == torch.uint8 else 2)
        raw = self._source.random_raw(-(-bytes_needed // 8))
        words = torch.from_numpy(raw).view(rate.word)[:count].view(shape)
        # Writing the comparison into an integer as wide as the data is 4 times as fast as into bools.
        kept = torch.empty(shape, dtype=_CARRIERS[dtype.itemsize])
        return torch.ge(words, rate.threshold, out=kept)

    def mask(self, shape: tuple[int, ...], p: float, dtype: torch.dtype) -> Tensor:
        """`shape` of `dtype`: 1 / (1 - rate) where the element stays, else 0."""
        rate = self.rate(p)
        pattern = int(torch.tensor(rate.scale, dtype=dtype).view(_CARRIERS[dtype.itemsize]))
        return self.keep(shape, rate, dtype).mul_(pattern).view(dtype)


def zero_dropped(values: Tensor, kept: Tensor, out: Tensor | None = None) -> Tensor:
    """`values` with those set to 0 whose `kept` is 0: a product of integers, exact for every bit pattern."""
    carrier = kept.dtype
    if out is None:
        return torch.mul(values.view(carrier), kept).view(values.dtype)
    torch.mul(values.view(carrier), kept, out=out.view(carrier))
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, p: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        mask = BitStream(draw_seed()).mask(tuple(values.shape), p, values.dtype)
        ctx.save_for_backward(mask)
        return values * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (mask,) = ctx.saved_tensors
        return gradient * mask, None


def dropout(values: Tensor, p: float, *, training: bool = True) -> Tensor:
    """`values` of any shape with a share `p` (0 <= p < 1) set to 0 and the rest scaled to keep the mean.

    Other devices and types than a CPU's 2 and 4 byte floats take torch's own.
    """
    if not training or p == 0.0:
        return values
    plain = values.device.type != "cpu" or values.dtype.itemsize not in _CARRIERS
    if plain or p > 0.99 or values.numel() == 0:
        return nn.functional.dropout(values, p, training)
    return _apply(values, p)


def _apply(values: Tensor, p: float) -> Tensor:
    result = _Dropout.apply(values, p)
    assert isinstance(result, Tensor)
    return result


class FastDropout(nn.Dropout):
    """`nn.Dropout` whose forward is `dropout`; same settings, same place in the module tree."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Dropout's own name
        return dropout(input, self.p, training=self.training)


def use_fast_dropout(module: nn.Module) -> int:
    """Turns every plain `nn.Dropout` inside `module` into a FastDropout; returns how many.

    Only the class of the instance changes: hooks, names and the rate stay. `use_torch_dropout` undoes it.
    """
    found = [child for child in module.modules() if type(child) is nn.Dropout and not child.inplace]
    _set_class(found, FastDropout)
    return len(found)


def use_torch_dropout(module: nn.Module) -> None:
    """Undoes `use_fast_dropout`."""
    _set_class([child for child in module.modules() if type(child) is FastDropout], nn.Dropout)


def _set_class(modules: Sequence[nn.Module], new: type[nn.Module]) -> None:
    for module in modules:
        module.__class__ = new
