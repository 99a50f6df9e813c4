"""Whole stories on the command line, with tiny random models: train, look, use, resume."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model_folders import save_bert, save_llama

from trimtab.cli import main


@dataclass
class Done:
    code: int
    out: str
    err: str

    def document(self) -> Any:
        return json.loads(self.out)


Trimtab = Callable[..., Done]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, and one finished Run each."""
    folder = tmp_path_factory.mktemp("home")
    save_bert(folder / "bert")
    save_llama(folder / "llama")
    rows = [(f"the cat sat {'nice ' * (n % 3)}good", "good") if n % 2 else (f"bad dog {n}", "bad") for n in range(40)]
    with (folder / "films.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(
            [("text", "label"), *((f"{text} {n}", label) for n, (text, label) in enumerate(rows))]
        )
    lines = [
        {"messages": [{"role": "user", "content": f"who {n}"}, {"role": "assistant", "content": "trim"}]}
        for n in range(12)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.fixture
def trimtab(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trimtab:
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("COLUMNS", "150")

    def call(*words: str) -> Done:
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        code = caught.value.code
        text = capsys.readouterr()
        return Done(code if isinstance(code, int) else 0, text.out, text.err)

    return call


FAST = ("--set", "machine.device=cpu", "--set", "machine.precision=fp32", "--set", "machine.threads=1")


@pytest.fixture
def classifier(home: Path, trimtab: Trimtab) -> Path:
    run = home / "runs" / "films"
    if not run.exists():
        flags = ("--set", "training.epochs=2", "--set", "training.batch_size=8", "--eval-first", *FAST)
        done = trimtab("train", "--model", "bert", "--data", "films.csv", "--output", "runs/films", "--json", *flags)
        assert done.code == 0, done.err
        document = done.document()
        assert document["status"] == "done"
        assert Path(document["model"]).is_dir()
        assert "accuracy" in document["metrics_before"]
        assert "accuracy" in document["metrics"]
        assert document["train_seconds"] > 0
        assert "evaluation at step 0" in done.err
    return run


def test_a_run_is_listed_with_its_metrics(classifier: Path, trimtab: Trimtab) -> None:
    listed = trimtab("runs", "--json").document()["runs"]
    assert [run["status"] for run in listed if run["name"] == "films"] == ["done"]
    assert "films" in trimtab("runs").out


def test_predictions_come_as_lines_of_json_and_as_csv(classifier: Path, trimtab: Trimtab) -> None:
    done = trimtab("predict", str(classifier), "--text", "the cat", "--text", "bad dog")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["text"] for row in rows] == ["the cat", "bad dog"]
    assert all(row["label"] in ("good", "bad") and 0 < row["probability"] <= 1 for row in rows)

    assert trimtab("predict", str(classifier), "films.csv", "--output", "out.csv").code == 0
    table = list(csv.DictReader(io.StringIO(Path("out.csv").read_text(encoding="utf-8"))))
    assert len(table) == 40
    assert {"text", "label", "predicted_label", "probability"} <= set(table[0])
    assert all(row["predicted_label"] in ("good", "bad") for row in table)
    assert [row["label"] for row in table[:2]] == ["bad", "good"]
    again = trimtab("predict", str(classifier), "films.csv", "--output", "out.csv")
    assert again.code == 2
    assert "--force" in again.err


def test_evaluation_and_inspection_report_as_json(classifier: Path, trimtab: Trimtab) -> None:
    metrics = trimtab("eval", str(classifier), "--data", "films.csv", "--json").document()["metrics"]
    assert 0 <= metrics["accuracy"] <= 1
    report = trimtab("inspect", "films.csv", "--model", "bert", "--json").document()
    assert report["task"] == "classification"
    assert report["rows_read"] == 40
    assert "First example" in trimtab("inspect", "films.csv", "--model", "bert").out


def test_init_writes_a_job_file_that_trains_from_another_folder(
    home: Path, trimtab: Trimtab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (home / "jobs").mkdir(exist_ok=True)
    done = trimtab(
        "init", "--model", "bert", "--data", "films.csv", "--output", "jobs/films.yaml", "--schema", "--force"
    )
    assert done.code == 0, done.err
    text = (home / "jobs" / "films.yaml").read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=films.schema.json\n")
    assert "kind: classification" in text
    assert "path: ../bert" in text
    json.loads((home / "jobs" / "films.schema.json").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    done = trimtab("train", str(home / "jobs" / "films.yaml"), "--set", "training.max_steps=2", *FAST)
    assert done.code == 0, done.err
    assert "use it: trimtab predict" in done.out
    assert (tmp_path / "runs").is_dir(), "what is written goes to the current folder"


def test_a_finished_run_is_neither_written_over_nor_resumed(classifier: Path, trimtab: Trimtab) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in classifier.rglob("*"))
    for words in (
        ["train", "--model", "bert", "--data", "films.csv", "--output", str(classifier)],
        ["resume", str(classifier)],
        ["resume", "bert"],
        ["predict", "bert", "--text", "x"],
    ):
        done = trimtab(*words)
        assert done.code == 2, words
        assert "Traceback" not in done.err
    assert sorted((path, path.stat().st_mtime_ns) for path in classifier.rglob("*")) == before


def test_a_chat_model_is_trained_and_answers(home: Path, trimtab: Trimtab, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--set", "method.kind=lora", "--set", "training.max_steps=2", "--set", "data.eval_fraction=0", *FAST)
    done = trimtab("train", "--model", "llama", "--data", "chats.jsonl", "--output", "runs/talk", *flags)
    assert done.code == 0, done.err
    assert "use it: trimtab chat runs/talk" in done.out
    answer = trimtab("chat", "runs/talk", "--message", "who are you", "--max-new-tokens", "4", "--json").document()
    assert isinstance(answer["answer"], str)
    monkeypatch.setattr(sys, "stdin", io.StringIO("who\n/reset\n\n/what\n/quit\nnot read\n"))
    done = trimtab("chat", "runs/talk", "--max-new-tokens", "2")
    assert done.code == 0
    assert "The conversation starts anew." in done.err
    assert done.out.count("\n") >= 1


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for child processes")
def test_ctrl_c_saves_and_leaves_with_130_and_resume_finishes(home: Path, trimtab: Trimtab) -> None:
    flags = [
        "--set",
        "training.epochs=400",
        "--set",
        "training.batch_size=4",
        "--set",
        "training.eval_every=100000",
        *FAST,
    ]
    words = ["train", "--model", "bert", "--data", "films.csv", "--output", "runs/long", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab", *words],
        cwd=home,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(home / "cache")},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
    assert process.stderr is not None
    seen: list[str] = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("step "):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=120) == 130, "".join(seen) + rest
    assert "trimtab resume runs/long" in rest
    listed = trimtab("runs", "--json").document()["runs"]
    assert [run["status"] for run in listed if run["name"] == "long"] == ["interrupted"]
