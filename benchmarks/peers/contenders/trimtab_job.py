"""Trimtab by its public way: a job and a listener. `--precision auto` is its default; it orders the rows itself."""

from __future__ import annotations

from typing import Any

from task import Task, read_task
from window import Window


def job_document(task: Task) -> dict[str, Any]:
    """What a user would write into the job file; everything left out is left to Trimtab."""
    columns = {"text": "text", "label": "label"} if task.kind == "classification" else {"template": "plain"}
    return {
        "model": {"path": task.model},
        "data": {"train": str(task.folder / "random.jsonl"), "eval_fraction": 0.0, **columns},
        "task": {"kind": task.kind},
        "training": {
            "batch_size": task.batch_size,
            "epochs": 1.0,
            "max_steps": task.steps,
            "learning_rate": task.learning_rate,
            "max_length": task.max_length,
            "group_by_length": task.order == "grouped",
            "seed": task.seed,
        },
        "machine": {"device": "cpu", "precision": task.precision},
        "output": {"run": str(task.scratch / "run")},
    }


class Listener:
    """Reads the events of a run as they come."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.settings: list[dict[str, str]] = []
        self.warnings: list[str] = []

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] == "plan":
            self.settings = [
                {"name": setting["name"], "value": setting["value"], "reason": setting["reason"]}
                for setting in event["settings"]
            ]
            self.window.ready()
        elif event["kind"] == "warning":
            self.warnings.append(event["message"])
        elif event["kind"] == "step":
            self._step(event)

    def _step(self, event: dict[str, Any]) -> None:
        self.window.count(event["tokens"], event["tokens"])
        self.window.losses.append(event["loss"])
        self.window.step_done()
        if self.window.done == self.window.steps:
            self.window.finish(settings=self.settings, warnings=self.warnings)


def main() -> None:
    task = read_task()
    window = task.window()
    from trimtab import api
    from trimtab.job import Job

    api.train(Job.model_validate(job_document(task)), listener=Listener(window))


if __name__ == "__main__":
    main()
