"""One micro-batch as tensors, in one of two layouts.

`padded`: rows of examples, `[examples, width]`, padded at the right to the longest.
`flat`: all examples laid end to end, `[1, tokens]`, with positions that start anew in each example.
Both hold the same examples in the same order and give the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["flat", "padded"]


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one micro-batch.

    Shapes: E examples, W the width (flat: the number of tokens and E' = 1; padded: the longest example and E' = E),
    P positions with a target.
    """

    layout: Layout
    lengths: tuple[int, ...]
    """Real tokens of each of the E examples."""
    input_ids: Tensor
    """[E', W] int64."""
    position_ids: Tensor
    """[E', W] int64, counted from 0 in each example."""
    attention_mask: Tensor | None
    """padded: [E, W] int64, 1 at real tokens; flat: None."""
    token_type_ids: Tensor | None
    """[E', W] int64 where the tokenizer makes segments, else None."""
    targets: Tensor
    """classification [E] int64; multilabel [E, classes] float32; regression [E] float32; per-token tasks [P] int64."""
    target_positions: Tensor | None
    """Per-token tasks: [P] int64 into the flattened `E' * W` positions whose output predicts `targets`; else None."""
    row_weights: Tensor | None = None
    """[E] or [P] float32 weight of each target in loss and denominator; None: all 1."""

    @property
    def examples(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(self.lengths)

    @property
    def slots(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    @property
    def target_tokens(self) -> int:
        """Targets that count in the loss."""
        return self.targets.shape[0]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        moved = {
            f.name: value.to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def pin(self) -> Batch:
        """The same batch in page-locked memory, for copies that do not block."""
        pinned = {
            f.name: value.pin_memory()
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **pinned)
