"""Refuses settings that would have no effect on the job at hand: silence would let a mistake pass for a setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.data.task import CLASS_KINDS, LABELLED_KINDS, LANGUAGE_KINDS
from trimtab.errors import JobError
from trimtab.job import Job, TaskKind

_TASKS: Mapping[str, tuple[TaskKind, ...]] = {
    "data.template": ("instruction",),
    "data.answer_marker": ("language_modelling",),
    "data.label": LABELLED_KINDS,
    "task.loss_on": ("instruction",),
    "task.class_weights": CLASS_KINDS,
    "task.label_smoothing": (*CLASS_KINDS, *LANGUAGE_KINDS),
}
"""Keys that mean something for some tasks only."""

_NEED_EVALUATION = ("training.best_metric", "training.early_stopping", "training.eval_every")
_ONLY_WHEN_SPLIT = ("data.eval_fraction", "data.group_by")


def refuse_without_effect(job: Job, kind: TaskKind, *, has_evaluation: bool) -> None:
    """Raises JobError that names every key which differs from its default and would change nothing."""
    wasted = {
        key: f"it is for {' and '.join(kinds)}, and this task is {kind}"
        for key, kinds in _TASKS.items()
        if kind not in kinds and _changed(job, key)
    }
    if not has_evaluation:
        wasted |= {key: "there is no evaluation data" for key in _NEED_EVALUATION if _changed(job, key)}
    if job.data.eval is not None:
        wasted |= {key: "data.eval names the held-out data" for key in _ONLY_WHEN_SPLIT if _changed(job, key)}
    if job.training.max_steps is not None and job.output.checkpoint_every is not None:
        every, steps = job.output.checkpoint_every, job.training.max_steps
        if every > steps:
            wasted["output.checkpoint_every"] = f"{every} steps are more than the {steps} of the run"
    if wasted:
        listed = "; ".join(f"{key} has no effect: {why}" for key, why in wasted.items())
        raise JobError(f"{listed}.", cure=f"Remove {', '.join(wasted)}.")


def _changed(job: Job, key: str) -> bool:
    """Whether the job says something else than the default. Not whether it says it: a run's job.yaml says all."""
    section_name, name = key.split(".")
    section: Any = getattr(job, section_name)
    return getattr(section, name) != type(section).model_fields[name].default
