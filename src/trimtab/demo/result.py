"""What a demo has shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RunError


@dataclass(frozen=True)
class DemoResult:
    """Measured on held-out examples that share nothing with the training data."""

    task: str
    metric: str
    metric_before: float
    metric_after: float
    train_seconds: float
    run: str
    model: str
    command: tuple[str, ...]
    """Arguments of `trimtab` that use the model."""
    answers: tuple[tuple[str, str, str], ...] = ()
    """Question, answer before, answer after."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """Keeps the evaluations of a run and passes every event on."""

    def __init__(self, listener: Any = None) -> None:
        self.listener = listener
        self.evaluations: list[dict[str, float]] = []
        self.done: dict[str, Any] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("kind") == "eval":
            self.evaluations.append(dict(event["metrics"]))
        elif event.get("kind") == "done":
            self.done = event
        if self.listener is not None:
            self.listener(event)

    def first(self, metric: str) -> float:
        """The metric before the first step."""
        return float(self.evaluations[0][metric])

    def last(self, metric: str) -> float:
        """The metric of the finished model."""
        metrics = self.done.get("metrics") or {}
        return float(metrics[metric] if metric in metrics else self.evaluations[-1][metric])


def new_folder(output: Path | None, name: str) -> Path:
    """`output`, or the first `runs/NAME-1`, `runs/NAME-2`, ... that does not exist."""
    if output is not None:
        if output.exists():
            raise RunError(f"{output} exists.", cure="Take another folder for --output.")
        return output
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


def data_folder(run: Path) -> Path:
    """The folder beside a Run that holds the demo's data files, made if need be."""
    folder = run.with_name(f"{run.name}-data")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
