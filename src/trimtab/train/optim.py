"""The optimizer, which weights decay, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.job import Schedule

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2019) with the usual betas; torch's fused kernel where the device has one."""

    learning_rate: float
    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


def decays(module: nn.Module) -> Callable[[str], bool]:
    """Tells by a parameter's name whether weight decay applies: not to biases, norms or anything of one axis."""
    exempt: set[str] = set()
    for module_name, owner in module.named_modules():
        is_norm = "norm" in type(owner).__name__.lower()
        for name, parameter in owner.named_parameters(prefix=module_name, recurse=False):
            if is_norm or parameter.ndim < 2 or name.endswith("bias"):
                exempt.add(name)
    return lambda name: name not in exempt


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], decay: Callable[[str], bool], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """AdamW over named float32 parameters in two groups, with and without decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        groups[decay(name)].append(parameter)
    param_groups = [
        {"params": members, "weight_decay": settings.weight_decay if decayed else 0.0}
        for decayed, members in groups.items()
        if members
    ]
    fused = all(p.device.type in ("cpu", "cuda") for members in groups.values() for p in members)
    return torch.optim.AdamW(
        param_groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=fused,
    )


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a pure function of the optimizer step, so that resume needs no saved scheduler."""

    peak: float
    schedule: Schedule
    warmup_steps: int
    steps: int

    def at(self, step: int) -> float:
        """Rate of a step counted from 1. The first steps rise to the peak; the last one is still above zero."""
        if step <= self.warmup_steps:
            return self.peak * step / (self.warmup_steps + 1)
        if self.schedule == "constant":
            return self.peak
        done = (step - self.warmup_steps - 1) / max(1, self.steps - self.warmup_steps)
        left = max(0.0, 1.0 - done)
        return self.peak * (left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))


def warmup_steps(warmup: float, steps: int) -> int:
    """`warmup` below 1 is a share of all steps; from 1 on it is a number of steps, at most all of them."""
    count = round(warmup * steps) if warmup < 1 else round(warmup)
    return min(count, steps)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of all groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: NamedParameters) -> dict[str, Tensor]:
    """The optimizer's state as `name.key` -> tensor, for the checkpoint. Parameters without state yet are left out."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: NamedParameters, tensors: dict[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` gave; each tensor goes to its parameter's device."""
    by_name = dict(named)
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition(".")
        parameter = by_name[name]
        device = parameter.device if value.ndim or parameter.device.type == "cuda" else torch.device("cpu")
        optimizer.state[parameter][key] = value.to(device=device, copy=True)
