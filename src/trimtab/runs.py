"""The Run folder: everything that one run is, in files that other processes may read.

run.json        id, status, versions        job.yaml        the job, as it was started
plan.json       what was decided, and why   data.json       the truth report on the data
task.json       kind, columns, label names  events.jsonl    what happened
checkpoints/    weights and optimizer       model/          the finished model
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trimtab import __version__
from trimtab.errors import RunError, nearest
from trimtab.events import read_events
from trimtab.files import make_folder, read_json, write_atomic, write_json
from trimtab.job import Job
from trimtab.jobfile import parse_job
from trimtab.text import program, safe, shell_path

RUN_FILE = "run.json"
STATUSES = ("created", "training", "interrupted", "failed", "done")
_LOCK_WRITE_SECONDS = 0.2
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


class Run:
    """One run, by its folder."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self._facts = facts

    @classmethod
    def create(cls, path: Path, *, job_text: str | None) -> Run:
        """Makes the folder. Nothing that lies there already is ever written over."""
        check_free(path)
        make_folder(path)
        run = cls(path, {"format": 1, "id": uuid.uuid4().hex, "trimtab": __version__, "status": "created"})
        if job_text is not None:
            write_atomic(path / "job.yaml", job_text)
        write_json(path / RUN_FILE, run._facts)
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """An existing run."""
        if not (path / RUN_FILE).is_file():
            raise RunError(f"{path} {_what(path)}.", cure=_near(path))
        try:
            facts = read_json(path / RUN_FILE)
            known = isinstance(facts["id"], str) and facts["status"] in STATUSES
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path / RUN_FILE} cannot be read: {error}.", cure="Restore it from a copy.") from error
        if not known:
            raise RunError(f"{path / RUN_FILE} is not one of this program's.", cure="Restore it from a copy.")
        return cls(path, facts)

    @property
    def id(self) -> str:
        return self._facts["id"]

    @property
    def status(self) -> str:
        """`created`, `training`, `interrupted`, `failed` or `done`."""
        return self._facts["status"]

    @property
    def job_path(self) -> Path:
        return self.path / "job.yaml"

    @property
    def job_text(self) -> str:
        """Raises RunError where there is no readable job file."""
        if not self.job_path.is_file():
            raise RunError(
                f"{self.path} has no job.yaml: it was made by trimtab.Trainer, or the file is lost.",
                cure="Use Trainer for it, or put the file back.",
            )
        try:
            return self.job_path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RunError(
                f"{self.job_path} is not UTF-8 at byte {error.start}.", cure="Put it back as it was."
            ) from error

    @property
    def job(self) -> Job:
        """The job as it was started."""
        return parse_job(self.job_text, str(self.job_path))

    @property
    def has_begun(self) -> bool:
        """Whether it got as far as its plan, the last thing that is written before the first step."""
        return (self.path / "plan.json").exists() or (self.path / "checkpoints").exists()

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def model_path(self) -> Path:
        """The finished model; there once the status is `done`."""
        return self.path / "model"

    def events(self) -> Iterator[dict[str, Any]]:
        """All events so far."""
        return read_events(self.events_path)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the finished run, or of its latest evaluation; empty where there is none."""
        found: dict[str, float] = {}
        for event in self.events():
            if event["kind"] in ("eval", "done"):
                found = event["metrics"] or found
        return found

    def set_status(self, status: str) -> None:
        """Writes the status into run.json."""
        assert status in STATUSES, status
        self._facts = {**self._facts, "status": status}
        write_json(self.path / RUN_FILE, self._facts)

    def read(self, name: str, *needed: str) -> dict[str, Any]:
        """One of the run's JSON documents (`plan`, `data`, `task`), which holds at least the keys `needed`."""
        path = self.path / f"{name}.json"
        try:
            document = read_json(path)
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read: {error}.", cure="Start the run anew from its job.yaml.") from error
        lacking = [key for key in needed if key not in document] if isinstance(document, dict) else ["{}"]
        if lacking:
            raise RunError(
                f"{path} is not as it was written: it lacks {lacking[0]}.", cure="Start the run anew from its job.yaml."
            )
        return document

    def write(self, name: str, document: Any) -> None:
        """Writes one of the run's JSON documents."""
        write_json(self.path / f"{name}.json", document)

    @contextmanager
    def lock(self) -> Generator[None]:
        """Only one process trains a run at a time. The lock of a process that is gone is taken over."""
        path = self.path / "lock.json"
        _take_lock(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_free(path: Path) -> None:
    """Refuses a path where a run, or anything else, already lies, or where no folder can be made."""
    try:
        if (path / RUN_FILE).exists():
            raise RunError(f"{path} already holds a run.", cure=_cure_taken(path))
        if path.is_dir() and any(path.iterdir()):
            raise RunError(f"{path} is a folder with other files in it.", cure="Choose another output.run.")
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file.", cure="Choose another output.run.")
        _check_writable(path)
    except OSError as error:
        raise RunError(
            f"{safe(str(path), limit=120)} cannot be a folder: {error.strerror or error}.",
            cure="Choose another output.run.",
        ) from error


def _cure_taken(path: Path) -> str:
    try:
        done = Run.open(path).status == "done"
    except RunError:
        done = False
    command = f"{program()} resume {shell_path(path)}"
    return "Choose another output.run." if done else f"Go on with: {command}, or choose another output.run."


def _check_writable(path: Path) -> None:
    """What can be known before any work is done; only the first write proves it."""
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not there.is_dir():
        raise RunError(
            f"{path} cannot be a folder: {there} is {'a file' if there.exists() else 'a link to nothing'}.",
            cure="Choose another output.run.",
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunError(
            f"{path} may not be written: {there} is read-only for you.",
            cure="Choose a folder that you may write by output.run.",
        )


def _take_lock(path: Path) -> None:
    mine = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    for _ in range(3):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f'{{"pid": {mine["pid"]}, "started": {mine["started"]}}}')
            return
        except FileExistsError:
            holder = _living_holder(path)
            if holder is not None:
                raise RunError(
                    f"{path.parent} is being trained by process {holder} at this moment.",
                    cure="Wait for it, or stop it with Ctrl-C.",
                ) from None
            path.unlink(missing_ok=True)
    raise RunError(f"{path} cannot be taken.", cure="Remove that file if no training runs.")


def _living_holder(path: Path) -> int | None:
    """Process that holds the lock, if it still lives: pids are used again, so its start must be the same too."""
    try:
        lock = _read_lock(path)
        started = psutil.Process(lock["pid"]).create_time()
        return lock["pid"] if abs(started - lock["started"]) < 1 else None
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None


def _read_lock(path: Path) -> Any:
    """The lock's content. One that is being written at this moment is given the time to become whole."""
    try:
        return read_json(path)
    except ValueError:
        time.sleep(_LOCK_WRITE_SECONDS)
        return read_json(path)


@dataclass(frozen=True)
class RunSummary:
    """One line of the list of runs."""

    name: str
    path: Path
    status: str
    step: int
    steps: int
    metrics: dict[str, float]
    changed: float
    """Unix seconds of the last event."""


def list_runs(root: Path) -> list[RunSummary]:
    """The runs below a folder, the newest last. Folders that are no runs are passed over.

    A run whose run.json cannot be read has the status `damaged`.
    """
    if not root.is_dir():
        return []
    # `os.path.isfile` passes over folders that may not be read, where `Path.is_file` raises.
    folders = [folder for folder in root.iterdir() if os.path.isfile(folder / RUN_FILE)]  # noqa: PTH113
    return sorted((_summary_of(folder) for folder in folders), key=lambda one: one.changed)


def _summary_of(folder: Path) -> RunSummary:
    try:
        return _summary(Run.open(folder))
    except RunError:
        return RunSummary(folder.name, folder, "damaged", 0, 0, {}, folder.stat().st_mtime)


def _summary(run: Run) -> RunSummary:
    step, steps, metrics, changed = 0, 0, {}, run.path.stat().st_mtime
    for event in run.events():
        changed = event["time"]
        if event["kind"] == "step":
            step, steps = event["step"], event["steps"]
        if event["kind"] in ("eval", "done"):
            metrics = event["metrics"] or metrics
    return RunSummary(run.path.name, run.path, run.status, step, steps, metrics, changed)


def next_run_path(root: Path, model: str, data: str) -> Path:
    """`root/<model>-<data>-<n>` with the first n that is free."""
    stem = "-".join(_short(part) for part in (model, data))
    number = 1
    while (root / f"{stem}-{number}").exists():
        number += 1
    return root / f"{stem}-{number}"


def _short(name: str) -> str:
    last = re.split(r"[\\/]", name.rstrip("\\/"))[-1]
    cleaned = _NOT_IN_NAMES.sub("-", last.split(".")[0]).strip("-.").lower()
    return cleaned[:24] or "run"


def _what(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    return "is a file" if path.is_file() else "is not a Run: it has no run.json"


def _near(path: Path) -> str:
    runs = [summary.path for summary in list_runs(path if path.is_dir() else path.parent)]
    if not runs:
        return "`trimtab runs FOLDER` lists them." if path.is_absolute() else f"You are in {Path.cwd()}."
    guess = nearest(path.name, [run.name for run in runs])
    hint = [f"Did you mean {path.with_name(guess)}?"] if guess and not path.exists() else []
    return " ".join([*hint, f"Runs there: {', '.join(str(run) for run in runs[-5:])}."])
