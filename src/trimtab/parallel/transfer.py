"""Moves a batch of any shape of container to a device, and pins it for copies that do not block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Movable(Protocol):
    """A batch that knows how to move itself, such as `trimtab.data.batches.Batch`."""

    def to(self, device: torch.device, *, non_blocking: bool = ...) -> Any: ...

    def pin(self) -> Any: ...


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with every tensor on `device`; copies from pinned memory do not block."""
    if isinstance(batch, Movable):
        return batch.to(device, non_blocking=True)
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Any) -> Any:
    """The same batch in page-locked host memory."""
    return batch.pin() if isinstance(batch, Movable) else map_tensors(batch, Tensor.pin_memory)


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to every tensor in nested dicts, lists and tuples; everything else stays as it is."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree
