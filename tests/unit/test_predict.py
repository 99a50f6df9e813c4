"""What a user gives to `predict`: rows of the training data as they are, a model's folder, a path that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_folders import save_bert, save_llama

import trimtab
from trimtab import api, text
from trimtab.cli import main, rows
from trimtab.errors import DataError, ModelError, RunError
from trimtab.jobfile import job_from_flags
from trimtab.predictor import _as_messages  # pyright: ignore[reportPrivateUsage]

ASKED = [{"role": "user", "content": "who"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "trim"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    save_bert(folder / "bert")
    save_llama(folder / "llama")
    return folder


@pytest.fixture(autouse=True)
def own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


def train(home: Path, model: str, data: Path, run: Path, **settings: str) -> trimtab.Run:
    flags = {
        "model.path": str(home / model),
        "data.train": str(data),
        "output.run": str(run),
        "training.max_steps": "1",
    }
    more = {"machine.threads": "1", "machine.precision": "fp32", "data.eval_fraction": "0"}
    return api.train(job_from_flags({**flags, **more, **{k.replace("__", "."): v for k, v in settings.items()}}))


def write_lines(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(document) for document in documents), encoding="utf-8")
    return path


def test_a_text_may_have_more_words_than_there_are_tags(home: Path, tmp_path: Path) -> None:
    documents = [{"words": ["red", "cat", str(n)], "tags": ["B", "O", "O"]} for n in range(8)]
    run = train(home, "bert", write_lines(tmp_path / "words.jsonl", documents), tmp_path / "run")
    (answer,) = trimtab.load(run.path).predict(["red cat runs and jumps over the big dog"])
    assert len(answer["tags"]) == len(answer["words"]) == 9
    assert set(answer["tags"]) <= {"B", "O"}


def test_a_model_of_plain_text_goes_on_with_the_text(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"the red cat runs {n}" for n in range(12)), encoding="utf-8")
    run = train(home, "llama", book, tmp_path / "run", task__kind="language_modelling")
    predictor, seen = trimtab.load(run.path), list[Any]()
    monkeypatch.setattr(predictor._generator, "generate_stream", lambda prompt: seen.append(prompt) or iter(["!"]))  # pyright: ignore[reportPrivateUsage]
    assert list(predictor.predict(["the red"])) == [{"text": "!"}]
    assert seen == ["the red"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ANSWERED},
        {"messages": ASKED},
        {"conversations": [{"from": "human", "value": "who"}, {"from": "gpt", "value": "trim"}]},
        {"conversations": [{"from": "human", "value": "who"}]},
        {"instruction": "who", "input": "", "output": "trim"},
        {"prompt": "who", "completion": "trim"},
    ],
)
def test_a_row_of_the_training_data_is_asked_without_its_answer(row: dict[str, Any]) -> None:
    assert _as_messages(row, api.TaskSpec("instruction", ("messages",)), 0) == ASKED


def test_an_alpaca_row_is_asked_with_its_input() -> None:
    row = {"instruction": "Add.", "input": "1 and 2"}
    (message,) = _as_messages(row, api.TaskSpec("instruction", ("instruction",)), 0)
    assert message["content"] == "Add.\n\n1 and 2"


def test_a_conversation_that_is_none_is_named() -> None:
    with pytest.raises(DataError, match=r"input 3: 'conversations' is text"):
        _as_messages({"conversations": "who"}, api.TaskSpec("instruction", ("conversations",)), 2)


@pytest.fixture(scope="module")
def chinese(home: Path) -> trimtab.Run:
    """Trained on a GBK file whose columns have Chinese names."""
    lines = ["内容,标签", *(f"菜{n}{'好' if n % 2 else '差'},{'好评' if n % 2 else '差评'}" for n in range(20))]
    (home / "评论.csv").write_text("\n".join(lines), encoding="gbk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        return train(home, "bert", home / "评论.csv", home / "zh", data__encoding="gbk")


def test_a_file_in_the_encoding_of_the_training_data_is_read(
    home: Path, chinese: trimtab.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    main_ends(["predict", str(chinese.path), str(home / "评论.csv")], 0)
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["内容"] == "菜0差" and first["label"] in ("好评", "差评")


def test_the_model_folder_of_a_run_stands_for_the_run(chinese: trimtab.Run) -> None:
    (answer,) = trimtab.load(chinese.model_path).predict(["菜好"])
    assert answer["label"] in ("好评", "差评")


def test_a_folder_that_is_no_run_and_cannot_write_is_refused(home: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a run nor a language model\. Name the run's folder"):
        trimtab.load(home / "bert")


def test_a_run_that_is_not_there_is_no_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main_ends(["predict", "runs/demo-topics-1", "--text", "a"], 2)
    told = " ".join(capsys.readouterr().err.split())
    assert told == f"error: runs/demo-topics-1 does not exist. You are in {tmp_path}."


def test_a_run_with_a_name_nearby_is_named(chinese: trimtab.Run, capsys: pytest.CaptureFixture[str]) -> None:
    main_ends(["chat", str(chinese.path.with_name("zhh")), "--message", "a"], 2)
    assert f"Did you mean {chinese.path}?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.xlsx", "out.json", "out"])
def test_an_output_that_would_not_be_what_its_name_says_is_refused(name: str) -> None:
    with pytest.raises(RunError, match=r"End it in \.jsonl, \.csv or \.tsv"):
        rows.output_format(Path(name))


@pytest.mark.parametrize(
    ("started", "found", "shown"),
    [
        ("/a/bin/trimtab", "/a/bin/trimtab", "trimtab"),
        ("/a/bin/trimtab", None, "/a/bin/trimtab"),
        ("/a/bin/trimtab", "/b/bin/trimtab", "/a/bin/trimtab"),
        (".venv/bin/trimtab", None, ".venv/bin/trimtab"),
        ("/a/trimtab/__main__.py", None, "/a/bin/python -m trimtab"),
        ("/a/trimtab/__main__.py", "/a/bin/trimtab", "trimtab"),
        ("/a/bin/pytest", None, "trimtab"),
    ],
)
def test_commands_are_shown_as_the_shell_can_run_them(
    started: str, found: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [started])
    monkeypatch.setattr("sys.executable", "/a/bin/python")
    monkeypatch.setattr("shutil.which", lambda name: found)
    monkeypatch.setattr("sys.platform", "linux")
    assert text.program() == shown


def main_ends(words: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == code
