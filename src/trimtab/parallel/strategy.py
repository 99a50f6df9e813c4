"""Who runs the forwards and backwards of a group, and in which type. The loop knows no device and no dtype.

Every strategy passes one contract: the same losses, gradients and weights as one device with one micro-batch. The loss
of a step is the sum over its targets divided by the group's own denominator, so neither the cut into micro-batches nor
the number of ranks can change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor, nn

from trimtab.errors import MachineError
from trimtab.job import Precision
from trimtab.parallel.transfer import pin, to_device
from trimtab.train.optim import (
    NamedParameters,
    OptimizerSettings,
    decays,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    set_learning_rate,
)

MAX_LOSS_SCALE = 2.0**16


class LossSum(Protocol):
    """The part of an objective that a strategy needs (see `trimtab.models.objective.Objective`)."""

    module: nn.Module

    def loss_sum(self, batch: Any) -> Tensor:
        """Float32 scalar with a graph."""
        ...


@dataclass(frozen=True)
class Applied:
    """What became of a step's gradients."""

    grad_norm: float
    """Norm over all trained weights before clipping, unscaled; inf or nan where the step was skipped."""
    applied: bool
    scale_lowered: bool = False
    """fp16 only: the step was skipped to lower the loss scale, which is how scaling finds its level."""


class Strategy(Protocol):
    """The devices of a run."""

    device: torch.device

    def stage(self, batch: Any) -> Any:
        """Makes a host batch ready for a fast copy; called ahead of time, from another thread."""
        ...

    def run_group(self, batches: Iterable[Any], denominator: float, seeds: Iterable[int]) -> float:
        """Forwards and backwards of a group; gradients are left in place. Returns the group's loss."""
        ...

    def apply(self, learning_rate: float, *, allowed: bool = True) -> Applied:
        """Unscales, clips and steps, or skips when a gradient is not finite. Gradients are gone after it.

        `allowed` False: the loss was not finite, so the step is skipped whatever the gradients.
        """
        ...

    def drop_gradients(self) -> None:
        """Forgets what an unfinished group left behind."""
        ...

    def free_memory(self) -> None:
        """Drops gradients and gives cached memory back, so that the group can run again in smaller pieces."""
        ...

    def evaluation(self) -> AbstractContextManager[None]:
        """The arithmetic of evaluation."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """`weights` and `optimizer` for the checkpoint, each name -> tensor."""
        ...

    def load(self, tensors: dict[str, dict[str, Tensor]], scalars: dict[str, float]) -> None:
        """Puts back `tensors()` and `scalars()`."""
        ...

    def scalars(self) -> dict[str, float]:
        """State that is no tensor: the loss scale."""
        ...

    def peak_bytes(self) -> int:
        """Peak of allocated device memory (of resident memory on a CPU) since the start."""
        ...

    def finish(self) -> None:
        """Leaves the trained float32 weights in the module."""
        ...


class OneDevice:
    """One process, one device.

    Trained weights are float32 in every precision. `fp16` and `bf16` run under autocast; `fp16` scales the loss.
    `bf16_weights` computes with a bf16 copy of the whole module while the optimizer keeps the float32 master: gradients
    leave the backward in bf16 and are summed over micro-batches in float32.
    """

    def __init__(
        self,
        objective: LossSum,
        *,
        device: torch.device,
        precision: Precision,
        settings: OptimizerSettings,
        max_grad_norm: float,
    ) -> None:
        self.objective = objective
        self.device = device
        self.precision: Precision = precision
        self.max_grad_norm = max_grad_norm
        module = objective.module
        self._named: NamedParameters = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._working: list[nn.Parameter] = []
        self._buffers = persistent_buffers(module)
        self._buffers_before: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        if precision == "bf16_weights":
            self._keep_masters(module)
        self.optimizer = make_optimizer(self._named, decays(module), settings)
        # Said for every precision: the switch belongs to the process, and another run may have set it.
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16", init_scale=MAX_LOSS_SCALE)

    def _keep_masters(self, module: nn.Module) -> None:
        """Moves the module to bf16 and the trained weights' float32 originals into the optimizer's hands."""
        masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self._named}
        working = dict(self._named)
        if any(buffer.is_floating_point() for buffer in persistent_buffers(module).values()):
            raise MachineError(
                "precision bf16_weights does not suit a module that keeps running statistics in float32 buffers.",
                cure="Use machine.precision: bf16 or fp32.",
            )
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
        self._working = [working[name] for name in masters]
        self._named = list(masters.items())
        for parameter, master in zip(self._working, masters.values(), strict=True):
            # On a CPU fresh memory for a large gradient costs more than filling it; on a card it is better given back.
            kept = torch.empty_like(master) if self.device.type == "cpu" else None
            self._handles.append(parameter.register_post_accumulate_grad_hook(_add_to(master, kept)))

    def place(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches on this strategy's device, one at a time."""
        return (to_device(batch, self.device) for batch in batches)

    def stage(self, batch: Any) -> Any:
        return pin(batch) if self.device.type == "cuda" else batch

    def run_group(self, batches: Iterable[Any], denominator: float, seeds: Iterable[int]) -> float:
        self._buffers_before = {name: buffer.clone() for name, buffer in self._buffers.items()}
        total = torch.zeros((), device=self.device)
        with self._autocast():
            for batch, seed in zip(self.place(batches), seeds, strict=True):
                torch.manual_seed(seed)
                loss = self.objective.loss_sum(batch) / denominator
                total += loss.detach()
                self._scaler.scale(loss).backward()
        return float(total)

    def apply(self, learning_rate: float, *, allowed: bool = True) -> Applied:
        self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        finite = allowed and math.isfinite(norm)
        if finite and self.max_grad_norm and norm > self.max_grad_norm:
            torch._foreach_mul_(gradients, self.max_grad_norm / (norm + 1e-6))  # pyright: ignore[reportPrivateUsage]
        set_learning_rate(self.optimizer, learning_rate)
        before = self._scaler.get_scale()
        if finite:
            self._scaler.step(self.optimizer)
            self._copy_masters()
        else:
            self._restore_buffers()
        # The scale touches gradients alone: lowering it cannot mend a loss that was not finite before it.
        lowered = allowed and not finite and before > 1.0 and self._scaler.is_enabled()
        if self._scaler.is_enabled():
            self._scaler.update(None if finite else (max(1.0, before / 2) if lowered else before))
        self.drop_gradients()
        return Applied(grad_norm=norm, applied=finite, scale_lowered=lowered)

    def _copy_masters(self) -> None:
        if self._working:
            with torch.no_grad():
                masters = [p.detach() for _, p in self._named]
                torch._foreach_copy_([p.detach() for p in self._working], masters)  # pyright: ignore[reportPrivateUsage]

    def _restore_buffers(self) -> None:
        """Running statistics go back to where they were before a group that was not applied."""
        for name, value in self._buffers_before.items():
            self._buffers[name].copy_(value)

    def free_memory(self) -> None:
        self.drop_gradients()
        self._restore_buffers()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._working:
            parameter.grad = None

    @contextmanager
    def evaluation(self) -> Generator[None]:
        with torch.inference_mode(), self._autocast():
            yield

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.device, self.precision)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        weights = {name: p.detach() for name, p in self._named}
        weights |= self._buffers
        return {"weights": weights, "optimizer": optimizer_tensors(self.optimizer, self._named)}

    def load(self, tensors: dict[str, dict[str, Tensor]], scalars: dict[str, float]) -> None:
        self.load_weights(tensors["weights"])
        load_optimizer_tensors(self.optimizer, self._named, tensors["optimizer"])
        if self._scaler.is_enabled() and "loss_scale" in scalars:
            state = {"scale": scalars["loss_scale"], "_growth_tracker": int(scalars["growth_tracker"])}
            self._scaler.load_state_dict(self._scaler.state_dict() | state)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Puts back trained weights and buffers alone, for instance those of the best checkpoint."""
        targets = {name: p.detach() for name, p in self._named} | self._buffers
        with torch.no_grad():
            for name, value in weights.items():
                targets[name].copy_(value)
        self._copy_masters()

    def scalars(self) -> dict[str, float]:
        if not self._scaler.is_enabled():
            return {}
        state = self._scaler.state_dict()
        return {"loss_scale": float(state["scale"]), "growth_tracker": float(state["_growth_tracker"])}

    def peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resident_peak_bytes()

    def finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter, (_, master) in zip(self._working, self._named, strict=False):
            parameter.data = master.detach()
        self._handles, self._working = [], []


def _add_to(master: nn.Parameter, kept: Tensor | None) -> Callable[[nn.Parameter], None]:
    """A hook that moves a bf16 gradient into the float32 master's and frees it; `kept` is memory for the latter."""

    def move(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float() if kept is None else kept.copy_(gradient)
        else:
            master.grad.add_(gradient)

    return move


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The arithmetic of a precision; nothing at all where the tensors' own types decide it."""
    types = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return torch.autocast(device.type, dtype=types[precision]) if precision in types else nullcontext()


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the state (running means and the like), by name."""
    names = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in names}


def resident_peak_bytes() -> int:
    """Peak resident memory of this process."""
    if psutil.WINDOWS:
        return int(psutil.Process().memory_info().peak_wset)  # pyright: ignore[reportAttributeAccessIssue]
    import resource  # absent on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if psutil.MACOS else peak * 1024)


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors that a smaller micro-batch cures."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError))
