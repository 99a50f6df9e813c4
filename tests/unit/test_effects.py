"""A setting without effect is an error that names it."""

from __future__ import annotations

import pytest

from trimtab.errors import JobError
from trimtab.job import TaskKind
from trimtab.jobfile import dump_job, job_from_flags, parse_job
from trimtab.planning.effects import refuse_without_effect

BASE = {"model.path": "m", "data.train": "d.csv"}


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("data.template", "chatml", "classification"),
        ("data.answer_marker", "'###'", "instruction"),
        ("data.label", "y", "language_modelling"),
        ("task.loss_on", "all", "regression"),
        ("task.class_weights", "balanced", "regression"),
        ("task.label_smoothing", "0.1", "regression"),
    ],
)
def test_a_key_of_another_task_is_refused(key: str, value: str, kind: TaskKind) -> None:
    with pytest.raises(JobError, match=rf"{key} has no effect.*Remove {key}"):
        refuse_without_effect(job_from_flags({**BASE, key: value}), kind, has_evaluation=True)


@pytest.mark.parametrize("key", ["training.early_stopping", "training.eval_every", "training.best_metric"])
def test_keys_about_evaluation_need_evaluation_data(key: str) -> None:
    job = job_from_flags({**BASE, key: "loss" if key.endswith("metric") else "2"})
    refuse_without_effect(job, "classification", has_evaluation=True)
    with pytest.raises(JobError, match="no evaluation data"):
        refuse_without_effect(job, "classification", has_evaluation=False)


def test_splitting_keys_are_refused_beside_given_evaluation_data() -> None:
    job = job_from_flags({**BASE, "data.eval": "e.csv", "data.eval_fraction": "0.2", "data.group_by": "author"})
    with pytest.raises(JobError, match=r"data\.eval_fraction has no effect.*data\.group_by has no effect"):
        refuse_without_effect(job, "classification", has_evaluation=True)


def test_a_job_with_every_default_written_out_is_accepted() -> None:
    job = parse_job(dump_job(job_from_flags(BASE)))
    for kind in ("classification", "regression", "language_modelling", "instruction", "token_classification"):
        refuse_without_effect(job, kind, has_evaluation=False)
