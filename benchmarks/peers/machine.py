"""Facts of the machine, and a probe of its speed taken beside every run."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

FLAGS_OF_INTEREST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


def pin(cores: list[int]) -> bool:
    """Binds this process, and so those it starts, to `cores`. False where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, cores)
    return True


def facts() -> dict[str, Any]:
    """What a reader needs to compare with another machine."""
    import psutil
    import torch

    return {
        "cpu": _cpu_name(),
        "flags": _cpu_flags(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def load_average() -> float | None:
    """Processes that wanted a core in the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def probe(threads: int) -> dict[str, float]:
    """FLOP/s of a 1024-square matrix product in both types, the median of 9, with `threads` threads."""
    import torch

    torch.set_num_threads(threads)
    rates = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        left, right = torch.randn(1024, 1024).to(dtype), torch.randn(1024, 1024).to(dtype)
        seconds = []
        for _ in range(9):
            start = time.process_time()
            torch.mm(left, right)
            seconds.append(time.process_time() - start)
        rates[name] = 2 * 1024**3 / sorted(seconds)[4]
    return rates


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def _cpu_name() -> str:
    named = next((line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    flags = next((line.split(":", 1)[1].split() for line in _cpu_lines() if line.startswith("flags")), [])
    return [flag for flag in FLAGS_OF_INTEREST if flag in flags]
