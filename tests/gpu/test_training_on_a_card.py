"""The same job on a card: every precision learns the same, a small card changes nothing but how it is computed."""

from __future__ import annotations

import gc
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab import api
from trimtab.errors import Interrupted
from trimtab.job import Job

STEPS = 6
KINDS = ("classification", "instruction")
GIB = 1024**3


def document(made: Any, output: Path, *, device: str, precision: str, **machine: Any) -> dict[str, Any]:
    """A job on a model that was made on the spot. Dropout is off, so that losses can be compared."""
    columns = {"text": "text", "label": "label"} if made.kind == "classification" else {"template": "plain"}
    return {
        "model": {"path": made.model, "dropout": 0.0},
        "data": {"train": made.rows, "eval_fraction": 0.0, **columns},
        "task": {"kind": made.kind},
        "training": {
            "batch_size": 8, "epochs": 10.0, "max_steps": STEPS, "max_length": 128,
            "learning_rate": 1e-3, "warmup": 0.0,
        },
        "machine": {"device": device, "precision": precision, **machine},
        "output": {"run": str(output)},
    }  # fmt: skip


def train(job: dict[str, Any], listener: Any = None) -> list[dict[str, Any]]:
    """The events of a whole run."""
    events: list[dict[str, Any]] = []

    def listen(event: dict[str, Any]) -> None:
        events.append(event)
        if listener is not None:
            listener(event)

    api.train(Job.model_validate(job), listener=listen)
    return events


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == "step"]


def losses_of(events: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps_of(events)]


@pytest.mark.parametrize("kind", KINDS)
def test_card_and_cpu_give_the_same_losses_in_fp32(made, tmp_path: Path, kind: str) -> None:
    exact = train(document(made(kind), tmp_path / "cpu", device="cpu", precision="fp32"))
    card = train(document(made(kind), tmp_path / "card", device="cuda", precision="fp32"))
    assert losses_of(card) == pytest.approx(losses_of(exact), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("precision", "distance"), [("tf32", 0.01), ("fp16", 0.05), ("bf16", 0.05), ("bf16_weights", 0.05)]
)
def test_every_precision_learns_what_fp32_learns(
    made, tmp_path: Path, kind: str, precision: str, distance: float
) -> None:
    needs_ampere = precision != "fp16"
    if needs_ampere and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"{torch.cuda.get_device_name()} has no {precision}")
    exact = train(document(made(kind), tmp_path / "fp32", device="cuda", precision="fp32"))
    other = train(document(made(kind), tmp_path / precision, device="cuda", precision=precision))
    applied = [step["applied"] for step in steps_of(other)]
    if precision == "fp16" and not all(applied):
        # Scaling finds its level by skipping steps, which moves the later losses.
        assert all(math.isfinite(loss) for loss in losses_of(other))
    else:
        assert losses_of(other) == pytest.approx(losses_of(exact), rel=distance)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_on_a_card_do_not_change_what_is_learned(made, tmp_path: Path, micro_batch: int) -> None:
    whole = train(document(made("instruction"), tmp_path / "whole", device="cuda", precision="fp32"))
    parts = train(
        document(made("instruction"), tmp_path / "parts", device="cuda", precision="fp32", micro_batch=micro_batch)
    )
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=1e-4)


def test_peak_bytes_are_those_of_the_card(made, tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    events = train(document(made("instruction"), tmp_path / "run", device="cuda", precision="fp32"))
    peaks = [step["peak_bytes"] for step in steps_of(events)]
    assert 0 < peaks[-1] <= torch.cuda.get_device_properties(0).total_memory
    assert peaks == sorted(peaks)
    assert peaks[-1] <= torch.cuda.max_memory_allocated()


def reserved_by(job: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Events of a run, and the most memory that it reserved."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    events = train(job)
    return events, torch.cuda.max_memory_reserved()


def test_a_card_that_is_too_small_for_the_step_gives_the_same_losses(made, tmp_path: Path) -> None:
    job = document(made("instruction"), tmp_path / "whole", device="cuda", precision="fp32")
    job["training"] |= {"batch_size": 48, "max_length": 256}
    whole, whole_bytes = reserved_by(job)
    one_by_one = {"machine": job["machine"] | {"micro_batch": 1}, "output": {"run": str(tmp_path / "single")}}
    _, single_bytes = reserved_by(job | one_by_one)
    # Enough for one example at a time and a little more, but not for the step at once.
    limit_bytes = single_bytes + (whole_bytes - single_bytes) // 4
    assert single_bytes < limit_bytes < whole_bytes
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    small = train(job | {"output": {"run": str(tmp_path / "small")}})
    assert losses_of(small) == pytest.approx(losses_of(whole), rel=1e-4)
    assert any(event.get("code") == "out_of_memory" for event in small)


def test_resume_on_a_card_gives_the_same_losses(made, tmp_path: Path) -> None:
    whole = train(document(made("instruction"), tmp_path / "whole", device="cuda", precision="fp32"))
    job = document(made("instruction"), tmp_path / "stopped", device="cuda", precision="fp32")
    seen: list[dict[str, Any]] = []

    def stop_after_three(event: dict[str, Any]) -> None:
        seen.append(event)
        if event["kind"] == "step" and event["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        train(job, stop_after_three)
    api.resume(tmp_path / "stopped", listener=seen.append)
    assert losses_of(seen) == pytest.approx(losses_of(whole), rel=1e-5)
