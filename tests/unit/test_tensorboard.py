from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from trimtab.events import make_event
from trimtab.train.tensorboard import TensorBoardWriter


def step(number: int, **fields: Any) -> dict[str, Any]:
    values = {
        "step": number,
        "loss": 1 / number,
        "grad_norm": 0.5,
        "learning_rate": 1e-4 * number,
        "tokens": 300,
        "step_seconds": 1.5,
        "peak_bytes": 3 * 1024**3,
    }
    return make_event("step", {**values, **fields})


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar that TensorBoard itself sees, as (step, value) by tag."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(folder))
        found.Reload()
        return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_steps_and_evaluations(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "board")
    for number in (1, 2, 3):
        writer.record(step(number))
    writer.record(make_event("eval", {"step": 3, "metrics": {"accuracy": 0.75, "f1": math.nan}, "seconds": 1.0}))
    writer.close()
    scalars = read(tmp_path / "board")
    assert set(scalars) == {
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens_per_second",
        "train/peak_bytes",
        "eval/accuracy",
        "eval/f1",
    }
    assert scalars["train/loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert scalars["train/tokens_per_second"] == [(1, 200.0), (2, 200.0), (3, 200.0)]
    assert scalars["train/peak_bytes"][0] == (1, 3 * 1024**3)
    assert scalars["eval/accuracy"] == [(3, 0.75)]
    assert math.isnan(scalars["eval/f1"][0][1])


def test_a_resumed_run_goes_on_in_the_folder_and_replaces_steps_done_again(tmp_path: Path) -> None:
    with_kill = TensorBoardWriter(tmp_path)
    for number in (1, 2, 3, 4):
        with_kill.record(step(number, loss=10.0))
    with_kill.close()
    resumed = TensorBoardWriter(tmp_path)
    for number in (3, 4, 5):
        resumed.record(step(number, loss=20.0))
    resumed.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path)["train/loss"] == [(1, 10.0), (2, 10.0), (3, 20.0), (4, 20.0), (5, 20.0)]


def test_many_resumes_within_a_second_stay_in_order(tmp_path: Path) -> None:
    for number in range(1, 13):
        writer = TensorBoardWriter(tmp_path)
        writer.record(step(number, loss=float(number)))
        writer.close()
    assert read(tmp_path)["train/loss"] == [(n, float(n)) for n in range(1, 13)]


def test_an_evaluation_is_on_the_disk_at_once(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.record(make_event("eval", {"step": 0, "metrics": {"loss": 2.0}, "seconds": 1.0}))
    assert read(tmp_path)["eval/loss"] == [(0, 2.0)]
    writer.close()


def test_a_torn_file_keeps_what_is_whole(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    for number in (1, 2):
        writer.record(step(number))
    writer.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    assert [number for number, _ in read(tmp_path)["train/loss"]] == [1]


def test_other_events_make_no_file(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path / "board")
    for kind in ("start", "plan", "checkpoint", "warning", "phase", "done"):
        writer.record(make_event(kind, {"step": 1}))
    writer.close()
    assert not (tmp_path / "board").exists()


def test_missing_and_unusable_values_are_left_out(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    writer.record(make_event("step", {"step": 1, "loss": math.inf, "peak_bytes": None, "tokens": 3, "step_seconds": 0}))
    writer.close()
    assert read(tmp_path) == {"train/loss": [(1, math.inf)]}


def test_nothing_is_imported_before_the_first_record_and_tensorflow_never(tmp_path: Path) -> None:
    # A TensorFlow that cannot be imported stands in for one that takes seconds.
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit(9)", encoding="utf-8")
    code = (
        "import sys; from trimtab.train.tensorboard import TensorBoardWriter; w = TensorBoardWriter(sys.argv[1])\n"
        "w.record({'kind': 'start'}); assert 'tensorboard' not in sys.modules and 'torch' not in sys.modules\n"
        "w.record({'kind': 'step', 'step': 1, 'loss': 1.0}); w.close(); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    board = tmp_path / "board"
    done = subprocess.run([sys.executable, "-c", code, str(board)], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert read(board) == {"train/loss": [(1, 1.0)]}
