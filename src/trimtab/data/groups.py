"""Which examples each optimizer step takes, and how they are cut into micro-batches. Pure functions; loads no torch.

The order of an epoch depends on (seed, epoch) alone. Step k takes the next `batch_size` examples of it, whatever device
or number of ranks computes them; the last step of an epoch may take fewer, and no example is dropped or repeated. The
cut into micro-batches depends on a limit that may change mid-run (out of memory) without a change in what is learned,
because the denominator of the loss belongs to the whole group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_LENGTH_WINDOW_GROUPS = 50
"""`group_by_length` sorts inside windows of so many groups: enough for almost no padding, few enough to stay random."""
_EXACT_CUT_EXAMPLES = 512
"""Up to here the cut is optimal (quadratic in examples); larger groups are cut greedily."""


def mix(*parts: int) -> int:
    """A 63-bit seed from integers (splitmix64 over a running state), the same on every machine and version."""
    state = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _splitmix(np.asarray(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF)))[()]
    return int(state >> np.uint64(1))


def _splitmix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 of each value (Steele, Lea, Flood 2014): a bijection that scatters neighbouring inputs."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def epoch_order(count: int, seed: int, epoch: int) -> Indices:
    """A random order of `count` examples that depends on (seed, epoch) alone, not on numpy's generators."""
    keys = _splitmix(np.arange(count, dtype=np.uint64) ^ np.uint64(mix(seed, epoch)))
    return np.argsort(keys, kind="stable").astype(np.int64)


@dataclass(frozen=True)
class MicroBatchLimit:
    """How large one forward and backward may be."""

    slots: int
    """Most positions, padding included. A single longer example still goes alone."""
    examples: int | None = None
    """Most examples; None: no limit of its own."""
    layout: Literal["flat", "padded"] = "padded"
    overhead_slots: int = 0
    """What one more micro-batch costs, in positions: padding below it is not worth a cut (padded layout)."""

    def halved(self, group_slots: int) -> MicroBatchLimit | None:
        """The next smaller limit after one that met `group_slots` positions ran out of memory; None at the end."""
        smaller = min(self.slots, group_slots) // 2
        return replace(self, slots=smaller) if smaller >= 1 else None


@dataclass(frozen=True)
class Group:
    """The data of one optimizer step."""

    step: int
    """Counted from 1."""
    epoch: float
    """Epochs completed once this step is done."""
    micro_batches: tuple[Indices, ...]
    """Example indices, longest micro-batch first, so that memory is met at once or not at all."""
    denominator: float
    """Sum of the loss weights of all targets in the group; known before its first forward."""
    tokens: int

    @property
    def examples(self) -> int:
        return sum(len(part) for part in self.micro_batches)


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """All groups of a run. `group(step)` is pure, so resume and retry need no saved position."""

    lengths: NDArray[np.int32]
    """Tokens of each example (1 for data without a length)."""
    weights: NDArray[np.float64]
    """Each example's share of a group's denominator: its targets, times their weights."""
    batch_size: int
    epochs: float
    seed: int
    limit: MicroBatchLimit
    max_steps: int | None = None
    group_by_length: bool = False

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.lengths) / self.batch_size)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        wanted = max(1, math.ceil(self.epochs * self.steps_per_epoch - 1e-9))
        return wanted if self.max_steps is None else min(wanted, self.max_steps)

    def examples_of(self, step: int) -> Indices:
        """Example indices of a step, in the order of the epoch."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        order = _ordered_epoch(self, epoch)
        return order[position * self.batch_size : (position + 1) * self.batch_size]

    def group(self, step: int, limit: MicroBatchLimit | None = None) -> Group:
        """The group of a step (from 1), cut by `limit` or by the plan's own."""
        indices = self.examples_of(step)
        parts = cut(indices, self.lengths, limit or self.limit)
        return Group(
            step=step,
            epoch=step / self.steps_per_epoch,
            micro_batches=parts,
            denominator=float(self.weights[indices].sum()),
            tokens=int(self.lengths[indices].sum()),
        )


@lru_cache(maxsize=2)
def _ordered_epoch(plan: GroupPlan, epoch: int) -> Indices:
    order = epoch_order(len(plan.lengths), plan.seed, epoch)
    if not plan.group_by_length:
        return order
    return _by_length(order, plan.lengths, plan.batch_size, mix(plan.seed, epoch, 1))


def _by_length(order: Indices, lengths: NDArray[np.int32], batch_size: int, seed: int) -> Indices:
    """Sorts inside windows, then puts the full groups in a random order. The short one stays last."""
    window = batch_size * _LENGTH_WINDOW_GROUPS
    parts = [order[start : start + window] for start in range(0, len(order), window)]
    in_windows = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    full = len(order) // batch_size
    groups = in_windows[: full * batch_size].reshape(full, batch_size)
    shuffled = groups[epoch_order(full, seed, 0)].reshape(-1)
    return np.concatenate([shuffled, in_windows[full * batch_size :]])


def cut(indices: Indices, lengths: NDArray[np.int32], limit: MicroBatchLimit) -> tuple[Indices, ...]:
    """Cuts examples into micro-batches under `limit`, longest first, each sorted by length."""
    ordered = indices[np.argsort(-lengths[indices], kind="stable")]
    sizes = lengths[ordered].astype(np.int64)
    if limit.layout == "padded" and len(ordered) <= _EXACT_CUT_EXAMPLES:
        ends = _best_padded_cut(sizes, limit)
    else:
        ends = _greedy_cut(sizes, limit)
    return tuple(ordered[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))


def slots_of(indices: Indices, lengths: NDArray[np.int32], layout: str) -> int:
    """Positions that a micro-batch computes."""
    sizes = lengths[indices]
    return int(sizes.sum()) if layout == "flat" else int(sizes.max()) * len(sizes)


def _greedy_cut(sizes: NDArray[np.int64], limit: MicroBatchLimit) -> list[int]:
    ends: list[int] = []
    start, filled = 0, 0
    for at, size in enumerate(sizes.tolist()):
        width = int(sizes[start])
        after = filled + size if limit.layout == "flat" else width * (at - start + 1)
        full = after > limit.slots or (limit.examples is not None and at - start >= limit.examples)
        if at > start and full:
            ends.append(at)
            start, filled = at, 0
        filled += size
    return [*ends, len(sizes)]


def _best_padded_cut(sizes: NDArray[np.int64], limit: MicroBatchLimit) -> list[int]:
    """The cut with the fewest computed positions plus `overhead_slots` a micro-batch, by dynamic programming.

    Sizes fall, so a micro-batch of examples [i, j) computes `sizes[i] * (j - i)` positions.
    """
    count = len(sizes)
    cost = np.full(count + 1, np.inf)
    cost[0] = 0
    best = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):
        starts = np.arange(0 if limit.examples is None else max(0, end - limit.examples), end)
        slots = sizes[starts] * (end - starts)
        total = cost[starts] + slots + limit.overhead_slots
        total = np.where((slots <= limit.slots) | (end - starts == 1), total, np.inf)
        at = int(np.argmin(total))
        cost[end], best[end] = total[at], starts[at]
    ends: list[int] = []
    end = count
    while end > 0:
        ends.append(end)
        end = int(best[end])
    return ends[::-1]


def evaluation_parts(lengths: NDArray[np.int32], limit: MicroBatchLimit) -> tuple[Indices, ...]:
    """All examples once, sorted by length and cut greedily: evaluation needs no random order."""
    indices = np.arange(len(lengths), dtype=np.int64)
    ordered = indices[np.argsort(-lengths, kind="stable")]
    ends = _greedy_cut(lengths[ordered].astype(np.int64), limit)
    return tuple(ordered[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))
