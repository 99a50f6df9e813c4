"""kill -9 at random moments: the run always goes on, and ends bit for bit as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from model_folders import save_bert
from safetensors.torch import load_file

from trimtab.events import steps_of
from trimtab.runs import Run

KILLS = 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs a fork server and SIGKILL, which Windows lacks"),
]


def _work(home: str, name: str) -> None:
    """In a child process: begins the run, or goes on with it."""
    os.environ["XDG_CACHE_HOME"] = f"{home}/cache"
    from trimtab import api
    from trimtab.jobfile import job_from_flags

    run = Path(home) / name
    if (run / "run.json").exists():
        api.resume(run)
        return
    api.train(
        job_from_flags(
            {
                "model.path": f"{home}/bert",
                "data.train": f"{home}/films.csv",
                "training.batch_size": "4",
                "training.epochs": "15",
                "training.learning_rate": "0.001",
                "machine.precision": "fp32",
                "machine.threads": "1",
                "output.run": str(run),
                "output.checkpoint_every": "3",
            }
        )
    )


@pytest.mark.timeout(280)
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert")
    rows = [f"{'good' if n % 2 else 'bad'} {n} {'cat ' * (n % 9)},{'yes' if n % 2 else 'no'}" for n in range(80)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trimtab.api", "transformers.models.bert.modeling_bert"])

    def start(name: str) -> multiprocessing.Process:
        child = context.Process(target=_work, args=(str(tmp_path), name))
        child.start()
        return child  # type: ignore[return-value]

    unbroken = start("whole")
    unbroken.join(120)
    assert unbroken.exitcode == 0
    moments = random.Random(7)
    kills = 0
    while kills < KILLS:
        child = start("killed")
        time.sleep(moments.uniform(0.05, 1.6))
        if not child.is_alive():
            break
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        kills += 1
        run = tmp_path / "killed"
        if run.exists() and not (run / "run.json").exists():
            for item in sorted(run.rglob("*"), reverse=True):  # killed before it was a run: nothing to resume
                item.unlink()
            run.rmdir()
    if kills == KILLS:
        last = start("killed")
        last.join(120)
        assert last.exitcode == 0
    assert kills >= 10, "the run ended before it was killed often enough"
    one, other = Run.open(tmp_path / "whole"), Run.open(tmp_path / "killed")
    assert other.status == "done"
    assert [e["loss"] for e in steps_of(other.events())] == [e["loss"] for e in steps_of(one.events())]
    ours, theirs = (load_file(run.model_path / "model.safetensors") for run in (other, one))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
