"""Where each example lies in a flat micro-batch, and how attention walks over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Bucket:
    """Examples that attention computes together: each padded to one width."""

    width: int
    starts: tuple[int, ...]
    """First token of each example in the flat micro-batch."""
    lengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class Segments:
    """The examples of a flat micro-batch, laid end to end in this order."""

    lengths: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def buckets(self, multiple: int, most_cells: int) -> tuple[Bucket, ...]:
        """Groups examples whose length rounds up to the same multiple.

        `most_cells`: most `examples * width ** 2` of a bucket, so that its scores stay near the processor; an example
        that alone has more goes alone.
        """
        key = (multiple, most_cells)
        if key not in self._cache:
            self._cache[key] = tuple(self._make_buckets(multiple, most_cells))
        return self._cache[key]

    @cached_property
    def _cache(self) -> dict[tuple[int, int], tuple[Bucket, ...]]:
        return {}

    def _make_buckets(self, multiple: int, most_cells: int) -> Iterator[Bucket]:
        by_width: dict[int, list[int]] = {}
        for index, length in enumerate(self.lengths):
            by_width.setdefault(-(-length // multiple) * multiple, []).append(index)
        for width, members in sorted(by_width.items(), reverse=True):
            most = max(1, most_cells // width**2)
            for at in range(0, len(members), most):
                part = members[at : at + most]
                yield Bucket(width, tuple(self.starts[i] for i in part), tuple(self.lengths[i] for i in part))
