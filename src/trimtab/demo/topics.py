"""MiniLM learns to tell six topics of short exchanges apart."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from trimtab import api
from trimtab.demo.packages import CHATTERBOT, MINILM, locate
from trimtab.demo.result import DemoResult, Recorder, data_folder, new_folder
from trimtab.job import Job

TOPICS = ("ai", "coding", "emotion", "literature", "psychology", "trivia")
INTRODUCTION = (
    "Fine-tuning MiniLM (23 M parameters) to sort questions into six topics.\n"
    "Three in ten exchanges are held out; those that share a sentence stay on one side."
)
SAMPLE = "what is the highest mountain of Africa?"


def run(output: Path | None, *, listener: Callable[[dict[str, Any]], None] | None = None) -> DemoResult:
    """Write the data, train, and tell the accuracy before and after."""
    model, corpus = locate(MINILM), locate(CHATTERBOT)
    folder = new_folder(output, "demo-topics")
    data = write_rows(read_rows(corpus), data_folder(folder) / "topics.csv")
    recorder = Recorder(listener)
    done = api.train(make_job(model, data, folder), listener=recorder, evaluate_first=True)
    return DemoResult(
        task="classification",
        metric="accuracy",
        metric_before=recorder.first("accuracy"),
        metric_after=recorder.last("accuracy"),
        train_seconds=float(recorder.done["train_seconds"]),
        run=str(done.path),
        model=str(done.model_path),
        command=("predict", str(done.path), "--text", SAMPLE),
    )


def make_job(model: Path, data: Path, run_folder: Path) -> Job:
    """The job of the demo."""
    return Job.model_validate(
        {
            "model": {"path": str(model)},
            "data": {
                "train": str(data),
                "text": "text",
                "label": "topic",
                "group_by": "group",
                "eval_fraction": 0.3,
            },
            "task": {"kind": "classification"},
            "training": {"epochs": 4.0, "batch_size": 16, "learning_rate": 1e-4, "max_length": 64},
            "output": {"run": str(run_folder)},
        }
    )


def read_rows(corpus: Path) -> list[dict[str, str]]:
    """One row for each exchange: what was said and the first reply, its topic, and its group.

    An exchange that the corpus repeats counts once. Exchanges that share a sentence, in whatever topic, are one group,
    since a split must not part them.
    """
    repeated = [(topic, exchange) for topic in TOPICS for exchange in _exchanges(corpus / f"{topic}.yml")]
    exchanges = list({" ".join(exchange): (topic, exchange) for topic, exchange in repeated}.values())
    groups = group_numbers([[_plain(sentence) for sentence in exchange] for _, exchange in exchanges])
    return [
        {"text": " ".join(exchange), "topic": topic, "group": str(group)}
        for (topic, exchange), group in zip(exchanges, groups, strict=True)
    ]


def _exchanges(path: Path) -> list[list[str]]:
    conversations = yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]
    return [[str(sentence).strip() for sentence in conversation[:2]] for conversation in conversations]


def _plain(sentence: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", sentence.lower()).strip()


def group_numbers(exchanges: list[list[str]]) -> list[int]:
    """The number of each exchange's group: the first exchange that it is linked to by shared sentences."""
    leader = list(range(len(exchanges)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    first_with: dict[str, int] = {}
    for index, exchange in enumerate(exchanges):
        for sentence in exchange:
            one, other = find(index), find(first_with.setdefault(sentence, index))
            leader[max(one, other)] = min(one, other)
    return [find(index) for index in range(len(exchanges))]


def write_rows(rows: list[dict[str, str]], path: Path) -> Path:
    """A CSV file with a header."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path
