"""The job file that `init` writes, and the options that become overrides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trimtab.cli.options import merge_flags, quote_list, read_settings
from trimtab.cli.starter import starter_text
from trimtab.errors import JobError
from trimtab.job import known_keys
from trimtab.jobfile import job_from_flags, parse_job, quoted

VALUES = {"model.path": "m/no", "data.train": ["a.csv", "b: c.csv"], "task.kind": "regression", "training.epochs": 2.0}


def test_every_key_is_there_with_its_explanation() -> None:
    text = starter_text(VALUES, {})
    joined = re.sub(r"\n  ## ", " ", text)
    for key, explanation in known_keys().items():
        assert re.search(rf"^  (# )?{key.split('.')[1]}: ", text, re.MULTILINE), key
        assert explanation in joined


def test_the_file_is_a_valid_job_with_the_values_given() -> None:
    job = parse_job(starter_text(VALUES, {"task.kind": "Inferred from data and model."}))
    assert job.model.path == "m/no"
    assert job.data.train == ["a.csv", "b: c.csv"]
    assert job.task.kind == "regression"
    assert job.training.epochs == 2.0


def test_the_reference_in_the_docs_is_what_init_writes() -> None:
    """To renew it: write `starter_text(...)` with these values to docs/job-file.yaml."""
    reference = Path(__file__).parents[2] / "docs" / "job-file.yaml"
    assert reference.read_text(encoding="utf-8") == starter_text({"model.path": "MODEL", "data.train": "DATA"}, {})


def test_removing_every_comment_sign_from_a_key_changes_nothing() -> None:
    text = starter_text(VALUES, {})
    bare = re.sub(r"^  # ", "  ", text, flags=re.MULTILINE)
    assert bare != text
    assert parse_job(bare) == parse_job(text)


def test_a_schema_line_comes_first_only_when_there_is_a_schema() -> None:
    assert "yaml-language-server" not in starter_text(VALUES, {})
    assert starter_text(VALUES, {}, schema="job.schema.json").startswith(
        "# yaml-language-server: $schema=job.schema.json\n"
    )


def test_settings_are_split_at_the_first_equals_sign() -> None:
    assert read_settings(["data.answer_marker=a=b", " training.epochs =2"]) == {
        "data.answer_marker": "a=b",
        "training.epochs": "2",
    }


@pytest.mark.parametrize("pairs", [["training.epochs"], ["=2"], ["a.b=1", "a.b=2"]])
def test_broken_settings_are_refused(pairs: list[str]) -> None:
    with pytest.raises(JobError, match="--set"):
        read_settings(pairs)


def test_a_flag_and_a_setting_for_one_key_exclude_each_other() -> None:
    with pytest.raises(JobError, match="by a flag and by --set"):
        merge_flags({"task.kind": "regression"}, {"task.kind": "classification"})


def test_odd_names_pass_through_flags_unchanged() -> None:
    for name in ("3", "no", "a: b", "[x]", "null", "C:\\data", "~x", "'q'"):
        job = job_from_flags({"model.path": quoted("m"), "data.train": quote_list([name]), "data.text": quoted(name)})
        assert job.data.text == name
        listed = job_from_flags({"model.path": quoted("m"), "data.train": "d", "data.text": quote_list([name, "b"])})
        assert listed.data.text == [name, "b"]
