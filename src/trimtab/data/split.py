"""Holding out examples: seeded, stratified, in groups that stay together. Pure functions; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Classes = Sequence[tuple[int, ...]]


def joined_groups(*keys: NDArray[np.generic]) -> Indices:
    """[n] group numbers such that examples equal in any of the keys are in one group, and so are chains of them."""
    inverses = [np.unique(key, return_inverse=True)[1] for key in keys]
    groups = np.arange(len(keys[0]), dtype=np.int64)
    while True:
        before = groups
        for inverse in inverses:
            lowest = np.full(int(inverse.max(initial=-1)) + 1, len(groups), dtype=np.int64)
            np.minimum.at(lowest, inverse, groups)
            groups = lowest[inverse]
        if np.array_equal(groups, before):
            return groups


def hold_out(
    count: int, fraction: float, seed: int, *, classes: Classes | None = None, groups: Indices | None = None
) -> tuple[Indices, Indices]:
    """(train, eval) numbers in rising order; a function of its arguments alone.

    Held out are `round(count * fraction)` examples, at least 1 and at most `count - 1`; with groups as near to that
    as whole groups allow, never more. With `classes` (the classes of each example) each class gives its share, by
    largest remainders, and keeps at least one example in train.

    Raises:
        ValueError: nothing can be held out under these rules; the message says why.
    """
    if count < 2:
        raise ValueError("one example cannot be split")
    wanted = min(max(round(Fraction(str(fraction)) * count), 1), count - 1)
    members = _members(count, groups)
    if len(members) < 2:
        raise ValueError("all examples are in one group")
    order = [members[i] for i in _shuffled(len(members), seed)]
    picker = _Picker(wanted, classes, count)
    for keep_shares in (True, False):
        for group in order:
            picker.offer(group, keep_shares)
    if not picker.held:
        smallest = sorted(order, key=len)
        picker.wanted = count - 1
        next((group for group in smallest if picker.offer(group, keep_shares=False, once=True)), None)
    if not picker.held:
        raise ValueError("every group holds all examples of some class")
    held = np.array(sorted(picker.held), dtype=np.int64)
    return np.setdiff1d(np.arange(count, dtype=np.int64), held, assume_unique=True), held


def _members(count: int, groups: Indices | None) -> list[list[int]]:
    """Groups as lists of examples, in the order of their first example, so that the numbers of groups do not matter."""
    if groups is None:
        return [[i] for i in range(count)]
    found: dict[int, list[int]] = {}
    for index, group in enumerate(groups.tolist()):
        found.setdefault(group, []).append(index)
    return list(found.values())


def _shuffled(count: int, seed: int) -> list[int]:
    # Raw output of PCG64 is the same in every numpy version, which `permutation` does not promise.
    keys = np.asarray(np.random.PCG64(seed).random_raw(count))
    return np.argsort(keys, kind="stable").tolist()


class _Picker:
    """Takes groups into the held-out part while the rules allow it."""

    def __init__(self, wanted: int, classes: Classes | None, count: int) -> None:
        self.wanted = wanted
        self.held: set[int] = set()
        self._classes = classes
        self._left: dict[int, int] = {}
        for labels in classes or ():
            for label in labels:
                self._left[label] = self._left.get(label, 0) + 1
        self._shares = _shares(self._left, wanted / count)

    def offer(self, group: list[int], keep_shares: bool, once: bool = False) -> bool:
        """Takes the group when there is room, no class loses its last example and, if asked, no share is exceeded."""
        if len(self.held) + len(group) > self.wanted or group[0] in self.held or (once and self.held):
            return False
        counts: dict[int, int] = {}
        for index in group:
            for label in self._classes[index] if self._classes is not None else ():
                counts[label] = counts.get(label, 0) + 1
        if any(self._left[label] <= number for label, number in counts.items()):
            return False
        if keep_shares and any(self._shares[label] < number for label, number in counts.items()):
            return False
        for label, number in counts.items():
            self._left[label] -= number
            self._shares[label] -= number
        self.held.update(group)
        return True


def _shares(counts: dict[int, int], fraction: float) -> dict[int, int]:
    """How many of each class to hold out: rounded down, and what is missing given to the largest remainders."""
    exact = {label: number * fraction for label, number in counts.items()}
    shares = {label: min(int(value + 1e-9), counts[label] - 1) for label, value in exact.items()}
    missing = round(sum(exact.values())) - sum(shares.values())
    for label in sorted(exact, key=lambda one: (shares[one] - exact[one], one)):
        if missing > 0 and shares[label] < counts[label] - 1:
            shares[label] += 1
            missing -= 1
    return shares
