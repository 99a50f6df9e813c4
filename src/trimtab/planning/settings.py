"""Decides what the job leaves open, and says why. Nothing decided here changes what is learned but for the defaults of
`training`, which depend on method and task alone and never on the machine.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trimtab.data.groups import MicroBatchLimit
from trimtab.errors import JobError, MachineError
from trimtab.hardware.probe import CpuTiming, Device, check_precision, describe, fast_threads, time_cpu
from trimtab.job import Job, MachineSection, MethodSection, Precision, TrainingSection
from trimtab.train.optim import warmup_steps
from trimtab.units import format_bytes

DEFAULT_LEARNING_RATES = {"full": 5e-5, "lora": 2e-4, "last_layers": 5e-5, "head": 1e-3}
"""The usual peaks for AdamW: BERT's authors give 2e-5 to 5e-5 for full tuning, LoRA needs several times as much."""

_ACTIVATION_SHARE = {"cuda": 0.25, "cpu": 0.05}
"""Share of the free memory that one micro-batch's activations may take until the planner predicts them exactly. A card
needs large micro-batches to be busy; a CPU is as fast with small ones, and its memory serves other programs too."""
_FLOATS_PER_TOKEN_AND_WIDTH = 34
"""Activations kept per token, layer and unit of width (Korthikanti et al. 2022, eq. 1 without the attention term)."""
_LEAST_SLOTS, _MOST_SLOTS_CPU, _MOST_SLOTS_CARD = 512, 4096, 16384
_TIMING_TOKENS = 512


@dataclass(frozen=True)
class Setting:
    """One line of the plan as it is shown."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Learning:
    """What is learned, with every default filled in."""

    learning_rate: float
    warmup_steps: int
    max_length: int


@dataclass(frozen=True)
class Compute:
    """How it is computed on this machine."""

    device: str
    precision: Precision
    threads: int | None
    layout: Literal["flat", "padded"]
    slots: int
    examples: int | None
    overhead_slots: int
    gemm_flops_per_second: float | None
    """Measured rate of matrix products at the model's shapes in this precision; None where it was not timed."""

    def limit(self) -> MicroBatchLimit:
        return MicroBatchLimit(self.slots, self.examples, self.layout, self.overhead_slots)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Shape:
    """The model's sizes that a decision needs."""

    width: int
    inner: int
    layers: int


def default_learning_rate(method: MethodSection, training: TrainingSection) -> tuple[float, str]:
    """The job's learning rate, or the usual one of its method."""
    if training.learning_rate is not None:
        return training.learning_rate, "set in the job"
    kind = "head" if method.kind == "last_layers" and method.last_layers == 0 else method.kind
    name = "the head alone" if kind == "head" else kind
    return DEFAULT_LEARNING_RATES[kind], f"the usual peak for {name} with AdamW"


def decide_warmup(training: TrainingSection, steps: int) -> int:
    """Warm-up in optimizer steps; refused when it would take the whole run."""
    count = warmup_steps(training.warmup, steps)
    if training.warmup >= 1 and training.warmup >= steps:
        raise JobError(
            f"training.warmup is {training.warmup:g} steps, but the run has only {steps}.",
            cure="Use a share such as training.warmup: 0.06.",
        )
    return count


@dataclass(frozen=True)
class Arithmetic:
    """Type and threads, decided before the model is loaded."""

    precision: Precision
    threads: int | None
    gemm_flops_per_second: float | None


def decide_arithmetic(machine: MachineSection, device: Device, shape: Shape | None) -> tuple[Arithmetic, list[Setting]]:
    """Precision and threads. `shape` None: a module of unknown sizes, fp32 on a CPU, the card's best type on a card."""
    _check_threads(machine)
    timing, reason = _decide_precision(machine, device, shape)
    threads = timing.threads if device.type == "cpu" else None
    settings = [
        Setting("device", str(device.torch_device), describe(device)),
        Setting("precision", timing.precision, reason),
    ]
    if threads:
        settings.append(Setting("threads", str(threads), "set in the job" if machine.threads else "measured just now"))
    return Arithmetic(timing.precision, threads, timing.flops_per_second or None), settings


def _check_threads(machine: MachineSection) -> None:
    """More threads than processors only wait for each other; some tens of thousands end the process."""
    here = os.cpu_count() or 1
    if machine.threads is not None and machine.threads > here:
        raise MachineError(
            f"machine.threads is {machine.threads:,}, and this machine has {here} processor{'s' * (here != 1)}.",
            cure=f"Set machine.threads to {here} or less, or leave it out to have it measured.",
        )


def decide_compute(
    machine: MachineSection, device: Device, arithmetic: Arithmetic, shape: Shape | None, padded_reason: str | None
) -> tuple[Compute, list[Setting]]:
    """Layout and micro-batch limit. `padded_reason` says why the model cannot run padding-free; None where it can."""
    layout: Literal["flat", "padded"] = "flat" if padded_reason is None else "padded"
    flat = "no padding: the examples of a micro-batch lie end to end"
    slots, slots_reason = _decide_slots(device, shape, arithmetic.precision)
    compute = Compute(
        device=str(device.torch_device),
        precision=arithmetic.precision,
        threads=arithmetic.threads,
        layout=layout,
        slots=slots,
        examples=machine.micro_batch,
        overhead_slots=_overhead_slots(device),
        gemm_flops_per_second=arithmetic.gemm_flops_per_second,
    )
    return compute, [
        Setting("layout", layout, padded_reason or flat),
        Setting("micro-batch", _limit_text(slots, machine.micro_batch), slots_reason),
    ]


def _limit_text(slots: int, examples: int | None) -> str:
    return f"up to {slots} positions" + (f", {examples} examples" if examples else "")


def _overhead_slots(device: Device) -> int:
    """What one more micro-batch costs in positions: small on a CPU, where a kernel launch is cheap against its work."""
    return 48 if device.type == "cpu" else 1024


def _decide_precision(machine: MachineSection, device: Device, shape: Shape | None) -> tuple[CpuTiming, str]:
    wish = machine.precision
    if wish != "auto":
        check_precision(device, wish)
    if device.type != "cpu":
        best = device.precisions()[0]
        reason = "set in the job" if wish != "auto" else f"the fastest type that {device.name} really has"
        return CpuTiming(best if wish == "auto" else wish, 0, 0.0), reason
    if shape is None:
        threads = machine.threads or fast_threads()
        return CpuTiming("fp32" if wish == "auto" else wish, threads, 0.0), _why(
            wish, "exact, for a module of your own"
        )
    timings = time_cpu(
        tokens=_TIMING_TOKENS,
        width=shape.width,
        inner=shape.inner,
        threads=(machine.threads,) if machine.threads else (),
    )
    wanted: Precision | None = None if wish == "auto" else ("fp32" if wish == "fp32" else "bf16_weights")
    best = next(timing for timing in timings if wanted is None or timing.precision == wanted)
    other = next((timing for timing in timings if timing.precision != best.precision), best)
    speed = f"{best.flops_per_second / 1e9:,.0f} GFLOP/s here against {other.flops_per_second / 1e9:,.0f}"
    named = best if wish == "auto" else CpuTiming(wish, best.threads, best.flops_per_second)
    return named, _why(wish, f"{speed} in {other.precision}")


def _why(wish: str, measured: str) -> str:
    return measured if wish == "auto" else "set in the job"


def _decide_slots(device: Device, shape: Shape | None, precision: Precision) -> tuple[int, str]:
    most = _MOST_SLOTS_CPU if device.type == "cpu" else _MOST_SLOTS_CARD
    if shape is None:
        return most, "the whole step at once until memory says no"
    bytes_per_float = 4 if precision in ("fp32", "tf32") else 2
    token_bytes = _FLOATS_PER_TOKEN_AND_WIDTH * shape.width * shape.layers * bytes_per_float
    fitting = int(device.free_bytes * _ACTIVATION_SHARE[device.type] / token_bytes)
    slots = max(_LEAST_SLOTS, min(most, fitting))
    return slots, f"about {format_bytes(slots * token_bytes)} of activations"


def _warm_up(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'} of warm-up" if steps else "no warm-up"


def learning_settings(job: Job, learning: Learning, steps: int, reasons: dict[str, str]) -> list[Setting]:
    """The plan's lines about what is learned."""
    training = job.training
    steps_text = f"{steps} of {training.batch_size} examples"
    return [
        Setting("steps", steps_text, f"{training.epochs:g} epochs" if training.max_steps is None else "max_steps"),
        Setting("learning rate", f"{learning.learning_rate:g}", reasons["learning_rate"]),
        Setting("schedule", training.schedule, _warm_up(learning.warmup_steps)),
        Setting("max length", f"{learning.max_length} tokens", reasons["max_length"]),
    ]
