"""The Run folder: nothing is written over, one trainer at a time, and everything in plain files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trimtab.errors import RunError
from trimtab.events import EventWriter, make_event
from trimtab.runs import Run, list_runs, next_run_path

JOB = "model:\n  path: m\ndata:\n  train: d.csv\n"


def make(path: Path) -> Run:
    return Run.create(path, job_text=JOB)


def test_a_run_is_opened_as_it_was_made(tmp_path: Path) -> None:
    made = make(tmp_path / "a")
    made.set_status("interrupted")
    opened = Run.open(tmp_path / "a")
    assert (opened.id, opened.status, opened.job_text) == (made.id, "interrupted", JOB)
    assert opened.job.model.path == "m"


def test_a_run_is_never_made_over_another(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(RunError, match=r"already holds a run.*trimtab resume"):
        make(tmp_path / "a")


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RunError, match=r"other files.*output\.run"):
        make(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    assert make(tmp_path).status == "created"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="is a file"):
        make(tmp_path / "a")


@pytest.mark.parametrize("text", ["{", "[]", '{"id": 3, "status": "done"}', '{"id": "x", "status": "odd"}'])
def test_a_damaged_run_file_is_one_line(tmp_path: Path, text: str) -> None:
    make(tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=r"run\.json"):
        Run.open(tmp_path / "a")


def test_what_is_no_run_names_the_runs_there(tmp_path: Path) -> None:
    make(tmp_path / "mine")
    with pytest.raises(RunError, match=r"does not exist.*mine"):
        Run.open(tmp_path / "mnie")
    with pytest.raises(RunError, match=r"is not a Run.*mine"):
        Run.open(tmp_path)


def test_metrics_are_those_of_the_last_evaluation(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    with EventWriter(run.events_path) as writer:
        writer.write(make_event("eval", {"step": 1, "metrics": {"accuracy": 0.5}}))
        writer.write(make_event("eval", {"step": 2, "metrics": {"accuracy": 0.75}}))
    assert run.metrics == {"accuracy": 0.75}


def test_runs_are_listed_and_other_folders_passed_over(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run = make(tmp_path / name)
        with EventWriter(run.events_path) as writer:
            writer.write(make_event("step", {"step": 3, "steps": 9}))
    (tmp_path / "other").mkdir()
    found = list_runs(tmp_path)
    assert sorted(one.name for one in found) == ["a", "b"]
    assert all((one.step, one.steps) == (3, 9) for one in found)
    assert list_runs(tmp_path / "none") == []


def test_names_of_new_runs_are_free_and_plain(tmp_path: Path) -> None:
    first = next_run_path(tmp_path, "Qwen/Qwen2.5-0.5B", "C:\\data\\my file.csv")
    assert first.name == "qwen2-my-file-1"
    first.mkdir()
    assert next_run_path(tmp_path, "Qwen/Qwen2.5-0.5B", "C:\\data\\my file.csv").name == "qwen2-my-file-2"
    assert next_run_path(tmp_path, "../..", "中文").name == "run-run-1"


def test_one_process_trains_a_run_at_a_time(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    code = (
        f"from pathlib import Path; from trimtab.runs import Run\nwith Run.open(Path({str(run.path)!r})).lock(): pass"
    )
    with run.lock():
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert other.returncode == 1 and f"is being trained by process {os.getpid()}" in other.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("pid", [2**22 + 1, "self"])
def test_the_lock_of_a_process_that_is_gone_is_taken_over(tmp_path: Path, pid: int | str) -> None:
    run = make(tmp_path / "a")
    # The same pid with another start: the system has used the number again.
    holder = os.getpid() if pid == "self" else pid
    lock = {"pid": holder, "started": psutil.Process().create_time() - 1000}
    (run.path / "lock.json").write_text(json.dumps(lock), encoding="utf-8")
    with run.lock():
        assert json.loads((run.path / "lock.json").read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert not (run.path / "lock.json").exists()
