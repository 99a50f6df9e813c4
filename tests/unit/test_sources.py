"""A user's own data: random augmentation is a function of seed, epoch and index, with any number of workers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from trimtab.data.sources import DatasetSource


class Noisy:
    """Items with noise from all three global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return {"x": torch.tensor([index + noise]), "y": torch.tensor(index)}


def test_items_are_collated_with_their_count() -> None:
    batch = DatasetSource(Noisy(), seed=1).batch(np.array([3, 1]), 0)
    assert batch.examples == 2
    assert batch.data["y"].tolist() == [3, 1]


def test_augmentation_depends_on_seed_epoch_and_index_alone() -> None:
    source = DatasetSource(Noisy(), seed=1)
    first = source.batch(np.array([3, 1]), 0).data["x"]
    torch.manual_seed(5)
    assert torch.equal(source.batch(np.array([1, 3]), 0).data["x"].flip(0), first)
    assert not torch.equal(source.batch(np.array([3, 1]), 1).data["x"], first)
    assert not torch.equal(DatasetSource(Noisy(), seed=2).batch(np.array([3, 1]), 0).data["x"], first)


@pytest.mark.slow
def test_workers_change_nothing() -> None:
    alone, pooled = DatasetSource(Noisy(), seed=1), DatasetSource(Noisy(), seed=1, workers=2)
    try:
        indices = np.array([3, 1, 7, 0])
        assert torch.equal(pooled.batch(indices, 2).data["x"], alone.batch(indices, 2).data["x"])
        assert pooled.in_background and not alone.in_background
    finally:
        pooled.close()
