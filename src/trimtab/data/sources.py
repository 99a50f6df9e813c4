"""Where micro-batches come from: a store of tokens, or anyone's own data set."""

from __future__ import annotations

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from trimtab.data.batches import Batch, Layout, collate
from trimtab.data.groups import Indices, mix
from trimtab.data.tokenstore import TokenStore

Collate = Any
"""A function from a list of the data set's items to one batch."""


class MapDataset(Protocol):
    """What torch calls a map-style data set: items by index, and a length."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class StoreSource:
    """Micro-batches of a token store."""

    store: TokenStore
    layout: Layout
    pad_id: int
    class_weights: tuple[float, ...] | None
    in_background: bool = True

    def batch(self, indices: Indices, epoch: int) -> Batch:
        """The examples of `indices` as tensors on the host."""
        del epoch
        return collate(self.store, indices, layout=self.layout, pad_id=self.pad_id, class_weights=self.class_weights)


class OwnBatch(NamedTuple):
    """A batch of a user's own data set."""

    data: Any
    examples: int


class DatasetSource:
    """Micro-batches of a user's data set.

    Python's, numpy's and torch's global random states are set from (seed, epoch, index) before each item, so random
    augmentation is the same after a resume and with any number of workers. With `workers` the items are made in other
    processes ahead of time, and the data set must be picklable by them (defined in a module, not in a notebook cell).
    """

    def __init__(self, dataset: MapDataset, *, seed: int, collate: Collate | None = None, workers: int = 0) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate or default_collate
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            self._pool = ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(dataset, seed),
            )
        self.in_background = workers > 0

    def batch(self, indices: Indices, epoch: int) -> OwnBatch:
        """The items of these indices, collated."""
        wanted: list[int] = indices.tolist()
        if self._pool is None:
            items = [seeded_item(self._dataset, self._seed, epoch, index) for index in wanted]
        else:
            items = list(self._pool.map(_worker_item, [epoch] * len(wanted), wanted))
        return OwnBatch(self._collate(items), len(wanted))

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def seeded_item(dataset: MapDataset, seed: int, epoch: int, index: int) -> Any:
    """One item, with every global random state a function of (seed, epoch, index)."""
    item_seed = mix(seed, epoch, index)
    random.seed(item_seed)
    np.random.seed(item_seed & 0xFFFFFFFF)
    torch.manual_seed(item_seed)
    return dataset[index]


_worker_state: list[tuple[MapDataset, int]] = []


def _start_worker(dataset: MapDataset, seed: int) -> None:
    torch.set_num_threads(1)
    _worker_state[:] = [(dataset, seed)]


def _worker_item(epoch: int, index: int) -> Any:
    dataset, seed = _worker_state[0]
    return seeded_item(dataset, seed, epoch, index)
