"""Prepares the next step's micro-batches while the device computes this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from trimtab.data.groups import Group, GroupPlan, Indices, MicroBatchLimit, mix


class BatchSource(Protocol):
    """The data of a run."""

    @property
    def in_background(self) -> bool:
        """True when `batch` may run in another thread: it must not draw from torch's global random state."""
        ...

    def batch(self, indices: Indices, epoch: int) -> Any:
        """The micro-batch of these examples, on the host."""
        ...


@dataclass(frozen=True)
class FedGroup:
    """A group with its micro-batches made and the random seed of each."""

    group: Group
    batches: list[Any]
    seeds: list[int]
    wait_seconds: float
    """How long the device would have stood still for it."""


class GroupFeed:
    """Hands out groups in order; one worker thread makes the next one ahead."""

    def __init__(self, plan: GroupPlan, source: BatchSource, stage: Callable[[Any], Any]) -> None:
        self._plan = plan
        self._source = source
        self._stage = stage
        self._worker = ThreadPoolExecutor(1, "trimtab-feed") if source.in_background else None
        self._ahead: tuple[int, MicroBatchLimit, Future[tuple[Group, list[Any]]]] | None = None

    def take(self, step: int, limit: MicroBatchLimit) -> FedGroup:
        """The group of a step under a limit; starts making the next one."""
        start = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (step, limit):
            group, batches = ahead[2].result()
        else:
            group, batches = self._make(step, limit)
        waited = time.perf_counter() - start
        if self._worker is not None and step < self._plan.steps:
            self._ahead = (step + 1, limit, self._worker.submit(self._make, step + 1, limit))
        seeds = [mix(self._plan.seed, step, at) for at in range(len(batches))]
        return FedGroup(group, batches, seeds, waited)

    def _make(self, step: int, limit: MicroBatchLimit) -> tuple[Group, list[Any]]:
        group = self._plan.group(step, limit)
        epoch = (step - 1) // self._plan.steps_per_epoch
        return group, [self._stage(self._source.batch(part, epoch)) for part in group.micro_batches]

    def __enter__(self) -> GroupFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
