"""What this machine's device is and how fast it multiplies, measured in a fraction of a second."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import psutil
import torch
from torch import Tensor

from trimtab.errors import MachineError
from trimtab.job import Precision
from trimtab.units import format_bytes

BF16_CAPABILITY = (8, 0)
"""Compute capability from which bf16 is real, and tf32 with it.

torch's permissive question also says yes to cards that emulate it."""
FP16_CAPABILITY = (5, 3)


@dataclass(frozen=True)
class Device:
    """Facts of one device."""

    type: str
    index: int
    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    def precisions(self) -> tuple[Precision, ...]:
        """What the device really has, best first; on a CPU the order is decided by measuring."""
        if self.capability is None:
            return ("bf16_weights", "fp32", "bf16")
        found: list[Precision] = []
        if self.capability >= BF16_CAPABILITY:
            found.extend(("bf16", "bf16_weights", "tf32"))
        if self.capability >= FP16_CAPABILITY:
            found.append("fp16")
        return (*found, "fp32")


def find_device(wish: str) -> Device:
    """The device asked for: `auto` takes the card with the most free memory, or the CPU where there is none."""
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return _cpu()
    if not torch.cuda.is_available():
        raise MachineError(
            f"machine.device is {wish}, but torch {torch.__version__} sees no CUDA card.",
            cure="Use machine.device: cpu, or install the torch build for the card.",
        )
    count = torch.cuda.device_count()
    if wish.startswith("cuda:"):
        index = int(wish.removeprefix("cuda:"))
        if index >= count:
            raise MachineError(
                f"machine.device is {wish}, but there are {count} cards, numbered from 0.",
                cure=f"Use machine.device: cuda:{count - 1} or auto.",
            )
        return _card(index)
    return max((_card(index) for index in range(count)), key=lambda card: card.free_bytes)


def _cpu() -> Device:
    memory = psutil.virtual_memory()
    name = platform.processor() or platform.machine()
    return Device(type="cpu", index=0, name=name, total_bytes=memory.total, free_bytes=memory.available)


def _card(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Device(
        type="cuda",
        index=index,
        name=properties.name,
        total_bytes=total,
        free_bytes=free,
        capability=(properties.major, properties.minor),
    )


def check_precision(device: Device, wanted: Precision) -> None:
    """Refuses a type that the device only emulates or lacks."""
    known = device.precisions()
    if wanted in known:
        return
    have = "a CPU" if device.capability is None else "compute capability {}.{}".format(*device.capability)
    raise MachineError(
        f"machine.precision is {wanted}, which {device.name} does not have ({have}).",
        cure=f"Use machine.precision: {known[0]} or leave it out.",
    )


def describe(device: Device) -> str:
    """`NVIDIA GeForce RTX 3060, 11.6 GiB free of 12.0 GiB`."""
    return f"{device.name}, {format_bytes(device.free_bytes)} free of {format_bytes(device.total_bytes)}"


@dataclass(frozen=True)
class CpuTiming:
    """One way to compute on this CPU and how fast it was."""

    precision: Precision
    threads: int
    flops_per_second: float
    """Of matrix products at the model's shapes, forward and both gradients."""


def time_cpu(*, tokens: int, width: int, inner: int, threads: tuple[int, ...] = ()) -> list[CpuTiming]:
    """Times a layer's products, its norm and its activation in each precision and number of threads; fastest first.

    A busy second core can make two threads several times slower than one, and a CPU without bf16 instructions computes
    bf16 many times slower than fp32, so both are measured, never assumed. Takes about 0.2 s.
    """
    counts = threads or tuple(sorted({1, usable_threads()}))
    types: dict[Precision, torch.dtype] = {"bf16_weights": torch.bfloat16, "fp32": torch.float32}
    found: list[CpuTiming] = []
    for count in counts:
        with torch_threads(count):
            for precision, dtype in types.items():
                seconds = _layer_seconds(tokens, width, inner, dtype)
                flops = 3 * 2 * 2 * tokens * width * inner
                found.append(CpuTiming(precision, count, flops / seconds))
    return sorted(found, key=lambda timing: -timing.flops_per_second)


def fast_threads() -> int:
    """The number of threads that is fastest at this moment, where no model's shape is known."""
    return time_cpu(tokens=256, width=256, inner=1024)[0].threads


def usable_threads() -> int:
    """Processors that this process may use: a container or affinity mask counts, hyper-threads of one core do not."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


@contextmanager
def torch_threads(count: int) -> Generator[None]:
    """Runs the block with so many intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _layer_seconds(tokens: int, width: int, inner: int, dtype: torch.dtype) -> float:
    """Median seconds of one feed-forward layer, forward and backward, after a warm-up that also bounds the repeats."""
    inputs = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    up = torch.randn(inner, width, dtype=dtype, requires_grad=True)
    down = torch.randn(width, inner, dtype=dtype, requires_grad=True)

    def once() -> float:
        start = time.perf_counter()
        out: Tensor = torch.nn.functional.gelu(inputs @ up.t()) @ down.t()
        torch.nn.functional.layer_norm(out, (width,)).sum().backward()
        return time.perf_counter() - start

    warm = once()
    repeats = 1 if warm > 0.1 else 4
    return median(once() for _ in range(repeats))
