"""The command line as a user meets it: help, start-up time, errors, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from trimtab import __version__
from trimtab.cli import main, output
from trimtab.errors import DataError, Interrupted, JobError, NotFiniteError

COMMANDS = ("train", "resume", "eval", "predict", "chat", "inspect", "runs", "init", "schema", "demo")
HEAVY = ("torch", "transformers", "peft", "numpy", "pyarrow", "tokenizers", "safetensors", "tensorboard", "pydantic")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Trimtab = Callable[..., Done]


@pytest.fixture
def trimtab(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Trimtab:
    """Runs the command line inside this process, which is much quicker than a new one."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*words: str, cwd: Path | None = None) -> Done:
        if cwd is not None:
            monkeypatch.chdir(cwd)
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        code = caught.value.code
        text = capsys.readouterr()
        return Done(code if isinstance(code, int) else 0, text.out, text.err)

    return call


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trimtab", "--help"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", done.stdout), command
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    assert not imported & set(HEAVY)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, trimtab: Trimtab) -> None:
    done = trimtab(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize("command", ["train", "resume", "eval", "predict", "inspect", "runs", "init", "demo"])
def test_every_command_that_reports_has_json(command: str, trimtab: Trimtab) -> None:
    assert "--json" in trimtab(command, "--help").stdout


def test_version(trimtab: Trimtab) -> None:
    assert trimtab("--version").stdout == f"trimtab {__version__}\n"


def test_the_console_script_runs_from_any_folder(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("trimtab.exe" if sys.platform == "win32" else "trimtab")
    if not script.exists():
        pytest.skip("trimtab is not installed beside this Python")
    done = subprocess.run([str(script), "--version"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"trimtab {__version__}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "nothing to train"),
        (["train", "absent.yaml"], "there is no job file absent.yaml"),
        (["train", "--model", "m"], "data.train is missing. Give --data FILE"),
        (
            ["train", "--model", "m", "--data", "d", "--set", "training.learning_rate=0"],
            "0 is not above 0. Use e.g. 2e-4.",
        ),
        (
            ["train", "--model", "m", "--data", "d", "--set", "training.lerning_rate=1"],
            "Did you mean 'training.learning_rate'?",
        ),
        (["train", "--model", "m", "--data", "d", "--set", "seed"], "a key and a value are needed"),
        (["train", "--model", "m", "--data", "d", "--set", "model.path=x"], "by a flag and by --set"),
        (["train", "--model", "m", "--data", "d", "--task", "clasification"], "Did you mean 'classification'?"),
        (["predict", "runs/x"], "either a file (or '-' for standard input) or --text"),
        (["demo", "topic"], "there is no demo 'topic'. Did you mean 'topics'?"),
        (["trian"], "No such command"),
    ],
)
def test_a_users_error_is_calm_and_leaves_with_2(
    words: list[str], message: str, tmp_path: Path, trimtab: Trimtab
) -> None:
    done = trimtab(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_with_json_is_one_document_on_stdout(tmp_path: Path, trimtab: Trimtab) -> None:
    done = trimtab("train", "absent.yaml", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode == 2
    assert "absent.yaml" in document["error"]


def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path, trimtab: Trimtab) -> None:
    for words in (["--debug", "train", "absent.yaml"], ["train", "absent.yaml", "--debug"]):
        done = trimtab(*words, cwd=tmp_path)
        assert "Traceback" in done.stderr
        assert done.returncode == 2


def test_hostile_names_cannot_steer_the_terminal(tmp_path: Path, trimtab: Trimtab) -> None:
    done = trimtab("train", "a\x1b[2Jb.yaml", cwd=tmp_path)
    assert "\x1b" not in done.stderr
    assert "\\x1b[2J" in done.stderr


@pytest.mark.parametrize("encoding", ["gbk", "ascii"])
def test_consoles_that_lack_characters_still_get_output(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "你好.yaml").write_text("- 你\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", "你好.yaml", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout.decode(encoding))["location"] == "你好.yaml:1"
    assert b"Traceback" not in done.stderr


def test_schema_is_json_that_names_every_section(trimtab: Trimtab) -> None:
    document = json.loads(trimtab("schema").stdout)
    assert set(document["properties"]) == {"model", "data", "task", "method", "training", "machine", "output"}
    assert document["$schema"].startswith("https://json-schema.org/")


def test_schema_keys_lists_every_key_with_its_explanation(trimtab: Trimtab) -> None:
    lines = trimtab("schema", "--keys").stdout.splitlines()
    assert any(line.startswith("training.batch_size") and "optimizer step" in line for line in lines)


# ------------------------------------------------------------------------------------------- errors inside the process


def leave(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    import typer

    @output.guarded
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    return caught.value.exit_code, capsys.readouterr().err


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(JobError("x"), capsys)[0] == 2
    assert leave(NotFiniteError("x"), capsys)[0] == 4
    assert leave(Interrupted("x"), capsys)[0] == 130
    assert leave(KeyboardInterrupt(), capsys) == (130, "error: interrupted.\n")


def test_an_unexpected_error_is_one_line_and_names_the_file_with_its_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    code, text = leave(ZeroDivisionError("division by\x1b[2J zero\nsecond line"), capsys)
    assert code == 1
    first, second = text.splitlines()
    assert first == "error: unexpected ZeroDivisionError: division by\\x1b[2J zero."
    written = Path(second.removeprefix("  The details are in ").removesuffix("."))
    assert "ZeroDivisionError" in written.read_text(encoding="utf-8")
    written.unlink()


def test_a_panic_of_a_library_is_calm_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        pass

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, text = leave(PanicException("thread pool"), capsys)
    assert code == 1
    assert text.startswith("error: unexpected PanicException: thread pool.")


def test_a_full_disk_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    import errno

    code, text = leave(OSError(errno.ENOSPC, "No space left on device", "runs/x"), capsys)
    assert code == 2
    assert text == "error: runs/x: No space left on device.\n  Free space on that disk.\n"


def test_every_problem_of_a_data_set_is_listed_up_to_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = leave(DataError("25 bad rows.", problems=[f"d.csv:{n}: empty" for n in range(25)], cure="Fix."), capsys)
    lines = text.splitlines()
    assert lines[1] == "  d.csv:0: empty"
    assert lines[-2:] == ["  ... and 5 more.", "  Fix."]


def test_json_never_holds_nan(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": "你"})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": "你"}
