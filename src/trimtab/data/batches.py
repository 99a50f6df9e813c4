"""One micro-batch as tensors, in one of two layouts.

`padded`: rows of examples, `[examples, width]`, padded at the right to the longest.
`flat`: all examples laid end to end, `[1, width]`, with positions that start anew in each example, then filler.
Both hold the same examples in the same order and give the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.data.task import IGNORED, TaskSpec

Layout = Literal["flat", "padded"]

FLAT_MULTIPLE = 64
"""A flat micro-batch is as wide as the next multiple, the rest being filler that nothing reads. Then few widths occur,
and a CPU's kernels, compiled for each width, are used again: 11 % more tokens a second on MiniLM, for 2 % of filler."""


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one micro-batch.

    Shapes: E examples, W the width (flat: tokens and filler, and E' = 1; padded: the longest example and E' = E),
    P positions with a target.
    """

    layout: Layout
    lengths: tuple[int, ...]
    """Real tokens of each of the E examples."""
    input_ids: Tensor
    """[E', W] int64; flat: filler after the last example."""
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
        """Positions computed, padding and filler included."""
        return self.input_ids.numel()

    @property
    def filler(self) -> int:
        """flat: positions after the last example."""
        return self.slots - self.tokens if self.layout == "flat" else 0

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
            f.name: value.pin_memory() for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **pinned)


class TokenSource(Protocol):
    """What `collate` reads of a token store (`trimtab.data.tokenize.TokenStore`)."""

    @property
    def spec(self) -> TaskSpec: ...

    @property
    def lengths(self) -> NDArray[np.int32]: ...

    def input_ids(self, index: int) -> NDArray[np.int32]: ...

    def token_types(self, index: int) -> NDArray[np.int8] | None: ...

    def labels(self, index: int) -> Any:
        """Class id, value, [classes] of 0/1, or [length] aligned with the tokens and not shifted."""
        ...


@dataclass(frozen=True)
class _Cells:
    """Where the tokens of a micro-batch lie in its `rows * width` positions."""

    rows: int
    width: int
    where: NDArray[np.int64]
    """[tokens] flattened position of each real token, examples in order."""
    within: NDArray[np.int64]
    """[tokens] each token's place in its own example."""

    def fill(self, values: NDArray[Any], padding: int) -> Tensor:
        """[rows, width] int64 with `values` [tokens] at the real positions."""
        cells = np.full(self.rows * self.width, padding, dtype=np.int64)
        cells[self.where] = values
        return torch.from_numpy(cells.reshape(self.rows, self.width))


def collate(
    store: TokenSource,
    indices: Sequence[int] | NDArray[np.int64],
    *,
    layout: Layout,
    pad_id: int,
    class_weights: Sequence[float] | None = None,
) -> Batch:
    """One micro-batch of the examples `indices` (at least one), in that order.

    `class_weights` [classes] become the `row_weights` of classification and token classification. For the language
    tasks the position of token t has token t + 1 of the same example as its target.
    """
    chosen = [int(i) for i in indices]
    lengths = store.lengths[chosen].astype(np.int64)
    cells = _cells(lengths, layout)
    token_types = [store.token_types(i) for i in chosen]
    known_types = [types for types in token_types if types is not None]
    targets, positions = _targets(store, chosen, cells)
    return Batch(
        layout=layout,
        lengths=tuple(lengths.tolist()),
        input_ids=cells.fill(np.concatenate([store.input_ids(i) for i in chosen]), pad_id),
        position_ids=_position_ids(cells, layout),
        attention_mask=cells.fill(np.ones(len(cells.where), dtype=np.int64), 0) if layout == "padded" else None,
        token_type_ids=cells.fill(np.concatenate(known_types), 0) if len(known_types) == len(chosen) else None,
        targets=targets,
        target_positions=positions,
        row_weights=_row_weights(store.spec, targets, class_weights),
    )


def _cells(lengths: NDArray[np.int64], layout: Layout) -> _Cells:
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    within = np.arange(total, dtype=np.int64) - np.repeat(starts, lengths)
    if layout == "flat":
        width = -(-total // FLAT_MULTIPLE) * FLAT_MULTIPLE
        return _Cells(1, width, np.arange(total, dtype=np.int64), within)
    width = int(lengths.max())
    where = np.repeat(np.arange(len(lengths), dtype=np.int64) * width, lengths) + within
    return _Cells(len(lengths), width, where, within)


def _position_ids(cells: _Cells, layout: Layout) -> Tensor:
    if layout == "flat":
        return cells.fill(cells.within, 0)
    return torch.from_numpy(np.tile(np.arange(cells.width, dtype=np.int64), (cells.rows, 1)))


def _targets(store: TokenSource, chosen: list[int], cells: _Cells) -> tuple[Tensor, Tensor | None]:
    labels = [store.labels(i) for i in chosen]
    make = _WHOLE_TEXT.get(store.spec.kind)
    if make is not None:
        return make(labels), None
    flat = np.concatenate(labels).astype(np.int64)
    counts = flat != IGNORED
    if store.spec.kind != "token_classification":
        # The first token of an example is nobody's target: the position before it belongs to another example.
        counts &= cells.within > 0
        return torch.from_numpy(flat[counts]), torch.from_numpy(cells.where[counts] - 1)
    return torch.from_numpy(flat[counts]), torch.from_numpy(cells.where[counts])


def _class_ids(labels: list[Any]) -> Tensor:
    return torch.tensor(labels, dtype=torch.int64)


def _rows_of_classes(labels: list[Any]) -> Tensor:
    return torch.from_numpy(np.stack(labels).astype(np.float32))


def _values(labels: list[Any]) -> Tensor:
    return torch.tensor(labels, dtype=torch.float32)


_WHOLE_TEXT: dict[str, Callable[[list[Any]], Tensor]] = {
    "classification": _class_ids,
    "multilabel_classification": _rows_of_classes,
    "regression": _values,
}


def _row_weights(spec: TaskSpec, targets: Tensor, class_weights: Sequence[float] | None) -> Tensor | None:
    if class_weights is None or spec.kind not in ("classification", "token_classification"):
        return None
    return torch.tensor(class_weights, dtype=torch.float32)[targets]
