"""The main story in seconds: train, read back, use. Run this one while working: `pytest tests/tiny`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_folders import save_bert

from trimtab.cli import main


def leave(arguments: list[str]) -> object:
    """Exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_train_and_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_bert(tmp_path / "bert")
    rows = [f"{'good' if n % 2 else 'bad'} {n},{'yes' if n % 2 else 'no'}" for n in range(40)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    settings = ("training.epochs=6", "training.learning_rate=0.01", "machine.threads=1")
    options = [word for setting in settings for word in ("--set", setting)]
    code = leave(["train", "--model", "bert", "--data", "films.csv", "--output", "run", "--json", *options])
    document = json.loads(capsys.readouterr().out)
    assert code == 0 and document["status"] == "done" and document["metrics"]["accuracy"] == 1.0
    assert leave(["predict", "run", "--text", "good 77", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["label"] == "yes"
