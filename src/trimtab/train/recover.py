"""What to do when a step goes wrong: name the module where numbers first stopped being finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class _LossSum(Protocol):
    module: nn.Module

    def loss_sum(self, batch: Any) -> Tensor: ...


def first_non_finite(objective: _LossSum, batches: Iterable[Any]) -> str:
    """Runs the micro-batches forward again and names the first place with an inf or a nan.

    Weights are looked at before activations, since one bad weight spoils everything after it. When the forward is
    finite throughout, the backward overflowed, and that is what is said.
    """
    for name, parameter in objective.module.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the weight {name}"
    found: list[str] = []
    handles = [
        module.register_forward_hook(_watch(name, found)) for name, module in objective.module.named_modules() if name
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                loss = objective.loss_sum(batch)
                if found:
                    return f"the output of {found[0]}"
                if not torch.isfinite(loss):
                    return "the loss itself, after finite outputs of every module"
    finally:
        for handle in handles:
            handle.remove()
    return "the backward pass, after a finite forward"


def _watch(name: str, found: list[str]) -> Any:
    """A hook that records the module when its first output is not finite. Inner modules report before outer ones."""

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        if not found and any(not torch.isfinite(tensor).all() for tensor in _float_tensors(output)):
            found.append(name)

    return look


def _float_tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in _float_tensors(value)]
    if isinstance(output, (tuple, list)):
        return [tensor for value in output for tensor in _float_tensors(value)]
    return []
