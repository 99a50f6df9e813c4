"""Models, jobs and outputs that are bad: each has one message, exit code 2, no traceback, and nothing is written over.

Bad data has its own table in test_bad_data.py.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from model_folders import edit_config, save_bert, save_llama
from safetensors.torch import load_file, save_file

from trimtab.cli import main
from trimtab.runs import Run, list_runs

FAST = ("--set", "machine.device=cpu", "--set", "machine.precision=fp32")
ROWS = "".join(f"{'good cat' if n % 2 else 'bad dog'} {n},{'y' if n % 2 else 'n'}\n" for n in range(40))


@dataclass
class Done:
    code: int
    out: str
    err: str


Trimtab = Callable[..., Done]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two whole models and data that trains."""
    folder = tmp_path_factory.mktemp("home")
    save_bert(folder / "bert")
    save_llama(folder / "llama")
    (folder / "f.csv").write_text(f"text,label\n{ROWS}", encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": f"trim {n}"}]}
        for n in range(8)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return folder


@pytest.fixture
def trimtab(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Trimtab:
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*words: str, stdin: bytes | None = None) -> Done:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        text = capsys.readouterr()
        return Done(caught.value.code if isinstance(caught.value.code, int) else 0, text.out, text.err)

    return call


@pytest.fixture(scope="module")
def runs(home: Path) -> dict[str, Path]:
    """A finished classifier and a finished chat model."""
    from trimtab import api
    from trimtab.jobfile import job_from_flags

    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(home.parent / "cache")
    made: dict[str, Path] = {}
    for model, data in (("bert", "f.csv"), ("llama", "chats.jsonl")):
        settings = {"model.path": str(home / model), "data.train": str(home / data), "training.max_steps": "1"}
        settings |= {"machine.precision": "fp32", "machine.device": "cpu", "machine.threads": "1"}
        made[model] = api.train(job_from_flags(settings | {"output.run": str(home.parent / f"run {model}")})).path
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
    return made


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below with its size and time of change."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def refused(done: Done, says: tuple[str, ...], before: dict[str, tuple[int, int]], folder: Path) -> None:
    assert done.code == 2, done.err
    message = done.err[done.err.index("error:") :]
    for part in says:
        assert part in message, message
    assert "Traceback" not in done.err
    assert "unexpected" not in message
    assert state(folder) == before


# ------------------------------------------------------------------------------------------------------------- models


def without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def text_of(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content, encoding="utf-8")

    return change


def shortened(share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return change


def with_weight(value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["encoder.layer.1.output.dense.weight"][3, 4] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


MODELS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no weights": (without("model.safetensors"), ("has no weights", "Download the weights")),
    "pickled weights": (as_pickle, ("pytorch_model.bin", "refused", "save_pretrained")),
    "weights cut in the middle": (
        shortened(0.5),
        ("model.safetensors is cut off: expected", "Download the file again"),
    ),
    "weights cut in the header": (shortened(0.001), ("model.safetensors is cut off", "Download the file again")),
    "no byte of weights": (shortened(0), ("holds 0 bytes", "Download the file again")),
    "a NaN weight": (with_weight(float("nan")), ("not a finite number", "layer.1.output.dense.weight", "Download")),
    "an infinite weight": (with_weight(float("-inf")), ("not a finite number", "Download the model again")),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), ("has no tokenizer", "Copy the tokenizer's")),
    "tokenizer settings alone": (without("tokenizer.json"), ("has no tokenizer", "tokenizer.json")),
    "broken tokenizer": (text_of("tokenizer.json", "{broken"), ("The tokenizer in", "line 1 column 2", "Copy")),
    "broken tokenizer settings": (text_of("tokenizer_config.json", "{x"), ("tokenizer_config.json:1:", "Download")),
    "no config": (without("config.json"), ("has no config.json", "Give the folder that holds config.json")),
    "broken config": (text_of("config.json", "{\n x"), ("config.json:2:", "Download the file again")),
    "config that is a list": (text_of("config.json", "[1]"), ("config.json is not a JSON object",)),
    "unknown family": (config(model_type="bertt"), ("family 'bertt'", "Did you mean 'bert'", "pip install -U")),
    "family not said": (config(model_type=None), ("model_type", "Add it")),
    "size that is text": (config(hidden_size="32"), ('config.json: hidden_size is "32"', "a whole number above 0")),
    "size below one": (config(num_hidden_layers=-1), ("num_hidden_layers is -1", "belongs to the weights")),
    "size that is a fraction": (config(vocab_size=80.5), ("vocab_size is 80.5", "a whole number")),
    "config of a wider model": (
        config(hidden_size=64),
        ("do not fit its config.json", "has shape [32", "and [64"),
    ),
    "config of a deeper model": (config(num_hidden_layers=5), ("lacks 32 of the", "belong together")),
    "config of another family": (config(model_type="llama"), ("lacks", "LlamaForSequenceClassification")),
    "heads that do not divide": (config(num_attention_heads=5), ("(32)", "(5)")),
    "code of its own": (config(model_type="zzz", auto_map={"AutoConfig": "c.C"}), ("trust_remote_code: true",)),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), ("quantised (gptq)", "unquantised")),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_bad_model_folder_is_refused(name: str, home: Path, trimtab: Trimtab, tmp_path: Path) -> None:
    change, says = MODELS[name]
    folder = tmp_path / "model"
    shutil.copytree(home / "bert", folder)
    change(folder)
    before = state(tmp_path)
    done = trimtab("train", "--model", str(folder), "--data", "f.csv", "--output", str(tmp_path / "run"), *FAST)
    refused(done, says, before, tmp_path)


PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "nothing there": ("berr", ("There is no model at berr", "Did you mean 'bert'?")),
    "no such home": ("~nobody-of-that-name/bert", ("There is no model at", "~nobody-of-that-name")),
    "a NUL in the name": ("bert\0x", ("There is no model at bert\\x00x",)),
    "a file of the model": ("bert/model.safetensors", ("is a file, not a model", "Use its folder")),
    "a hub id without a connection": ("some/model", ("hub could not be reached", "hf download some/model")),
    "a GGUF file of nothing": ("empty.gguf", ("does not begin with 'GGUF'",)),
    "a GGUF file cut at once": ("short.gguf", ("holds 4 bytes", "at least 24", "Download the file again")),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_holds_no_model_is_named(name: str, home: Path, trimtab: Trimtab) -> None:
    path, says = PLACES[name]
    (home / "empty.gguf").write_bytes(b"")
    (home / "short.gguf").write_bytes(b"GGUF")
    before = state(home)
    refused(trimtab("train", "--model", path, "--data", "f.csv", "--output", "run", *FAST), says, before, home)


# --------------------------------------------------------------------------------------------------------------- jobs

JOBS: dict[str, tuple[str, ...]] = {
    "training.learning_rate=0": ("training.learning_rate: 0 is not above 0", "Use e.g. 2e-4"),
    "training.learning_rate='1e-4'": ("'1e-4' in quotes is text", "Write 1e-4 without quotes"),
    "training.batch_size=-1": ("training.batch_size: -1 is below 1", "default is 16"),
    "training.epochs=0": ("training.epochs: 0 is not above 0",),
    "training.epochs=.nan": ("training.epochs", "not a finite number"),
    "training.batchsize=3": ("training.batchsize: there is no such key", "Did you mean 'training.batch_size'?"),
    "training.max_length=100000": ("100,000", "64 positions", "Set training.max_length to 64 or less"),
    "training.max_length=2": ("special tokens alone take 2", "3 or more"),
    "training.best_metric=acc": ("not measured for classification", "accuracy"),
    "training.warmup=5000": ("5000 steps", "only 9"),
    "machine.threads=1000000": ("machine.threads is 1,000,000", "processor", "or less"),
    "machine.device=cuda:99": ("cuda:99",),
    "task.kind=language_modelling": ("needs a model that writes text; bert", "model.path"),
    "task.kind=regression": ("a number is expected", "task.kind: classification"),
    "task.class_weights=[1]": ("needs 2 numbers", "balanced"),
    "data.text=txet": ("no column 'txet'", "Did you mean 'text'?"),
    "data.encoding=klingon": ("klingon is no text encoding", "gbk"),
    "data.template=chatml": ("data.template has no effect",),
    "method.rank=8": ("method.rank: 8` has no effect", "method.kind: lora"),
}


@pytest.mark.parametrize("setting", JOBS)
def test_a_bad_setting_is_refused(setting: str, home: Path, trimtab: Trimtab) -> None:
    before = state(home)
    device = () if "machine.device" in setting else ("--set", "machine.device=cpu")
    words = ("train", "--model", "bert", "--data", "f.csv", "--output", "run", *device, "--set", setting)
    refused(trimtab(*words, "--set", "machine.precision=fp32"), JOBS[setting], before, home)


# ------------------------------------------------------------------------------------------------------------- output


def a_file(folder: Path) -> Path:
    (folder / "afile").write_text("mine", encoding="utf-8")
    return folder / "afile"


def through_a_file(folder: Path) -> Path:
    return a_file(folder) / "run"


def other_files(folder: Path) -> Path:
    (folder / "thesis.txt").write_text("mine", encoding="utf-8")
    return folder


def a_link_to_nothing(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "gone" / "deep")
    return folder / "link" / "run"


def too_long(folder: Path) -> Path:
    return folder / ("x" * 300)


OUTPUTS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "a file": (a_file, ("afile is a file", "output.run")),
    "through a file": (through_a_file, ("cannot be a folder", "afile is a file", "output.run")),
    "a folder of other things": (other_files, ("other files in it", "output.run")),
    "a name too long": (too_long, ("cannot be a folder", "output.run")),
    "a link to nothing": (a_link_to_nothing, ("cannot be a folder", "link to nothing", "output.run")),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_that_cannot_be_a_run_is_refused_before_data_is_read(
    name: str, trimtab: Trimtab, tmp_path: Path
) -> None:
    make, says = OUTPUTS[name]
    output = make(tmp_path)
    before = state(tmp_path)
    done = trimtab("train", "--model", "bert", "--data", "f.csv", "--output", str(output), *FAST)
    refused(done, says, before, tmp_path)
    assert "read " not in done.err[: done.err.index("error:")]


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="needs a user whom modes bind")
def test_a_read_only_folder_is_refused_before_data_is_read(trimtab: Trimtab, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        before = state(tmp_path)
        done = trimtab("train", "--model", "bert", "--data", "f.csv", "--output", str(tmp_path / "run"), *FAST)
        refused(done, ("read-only for you", "output.run"), before, tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_anything_is_written(
    home: Path, trimtab: Trimtab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.disk_usage
    small = whole(tmp_path)._replace(free=300_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small if Path(path) == tmp_path else whole(path))
    before = state(tmp_path)
    done = trimtab("train", "--model", "bert", "--data", "f.csv", "--output", str(tmp_path / "run"), *FAST)
    refused(done, ("one checkpoint and the finished model", "only 293.0 KiB are free", "output.run"), before, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_predictions_that_the_disk_does_not_take_are_one_message(
    runs: dict[str, Path], trimtab: Trimtab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(path: Path, *words: Any, **named: Any) -> Any:
        return opened(Path("/dev/full") if path.name.endswith(".partial") else path, *words, **named)

    monkeypatch.setattr(Path, "open", full)
    done = trimtab("predict", str(runs["bert"]), "f.csv", "--output", str(tmp_path / "out.jsonl"))
    refused(done, ("out.jsonl cannot be written", "No space left", "--output"), {}, tmp_path)


def test_a_short_run_that_learned_nothing_is_not_called_done(home: Path, trimtab: Trimtab, tmp_path: Path) -> None:
    rows = "".join(f"cat {n},{n}e37\n" for n in range(1, 30))
    (tmp_path / "huge.csv").write_text(f"text,score\n{rows}", encoding="utf-8")
    words = ("--set", "training.max_steps=2", "--task", "regression", "--output", str(tmp_path / "run"))
    done = trimtab("train", "--model", "bert", "--data", str(tmp_path / "huge.csv"), *FAST, *words)
    assert done.code == 4, done.err
    assert "2 steps in a row" in done.err
    assert Run.open(tmp_path / "run").status == "failed"


def test_a_finished_run_is_not_written_over_and_the_command_can_be_pasted(
    runs: dict[str, Path], trimtab: Trimtab
) -> None:
    run = runs["bert"]
    before = state(run)
    quoted = f'"{run}"' if sys.platform == "win32" else f"'{run}'"
    again = trimtab("train", "--model", "bert", "--data", "f.csv", "--output", str(run), *FAST)
    refused(again, ("already holds a run", "Choose another output.run."), before, run)
    refused(trimtab("resume", str(run)), ("is finished", f"trimtab predict {quoted}"), before, run)


def test_a_run_below_the_home_folder_is_where_it_says(
    home: Path, trimtab: Trimtab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    one = ("--set", "training.max_steps=1", "--set", "machine.threads=1")
    done = trimtab("train", "--model", "bert", "--data", "f.csv", "--output", "~/my run", *FAST, *one)
    assert done.code == 0, done.err
    assert Run.open(tmp_path / "my run").status == "done"
    assert not (home / "~").exists()


def test_a_damaged_run_does_not_hide_the_others(runs: dict[str, Path], trimtab: Trimtab, tmp_path: Path) -> None:
    shutil.copytree(runs["bert"], tmp_path / "whole")
    shutil.copytree(runs["bert"], tmp_path / "torn")
    (tmp_path / "torn" / "run.json").write_text('{"id": ', encoding="utf-8")
    done = trimtab("runs", str(tmp_path), "--json")
    assert done.code == 0, done.err
    assert {run["name"]: run["status"] for run in json.loads(done.out)["runs"]} == {"whole": "done", "torn": "damaged"}
    missing = trimtab("resume", str(tmp_path / "whol"))
    assert missing.code == 2
    assert "does not exist" in missing.err


DOCUMENTS: dict[str, tuple[str, bytes, tuple[str, ...]]] = {
    "plan that is a list": ("plan.json", b"[]", ("plan.json is not as it was written", "job.yaml")),
    "plan without its keys": ("plan.json", b"{}", ("plan.json is not as it was written", "data_digest")),
    "plan cut off": ("plan.json", b'{"data', ("plan.json cannot be read", "job.yaml")),
    "task without its keys": ("task.json", b"{}", ("task.json is not as it was written", "kind")),
    "job of other bytes": ("job.yaml", b"\xff\xfe", ("job.yaml is not UTF-8 at byte 0",)),
    "job cut off": ("job.yaml", b"model: [", ("job.yaml:1:", "not valid YAML")),
}


@pytest.fixture
def stopped(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run that waits to be resumed."""
    shutil.copytree(runs["bert"], tmp_path / "run")
    Run.open(tmp_path / "run").set_status("interrupted")
    return tmp_path / "run"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_run_with_a_damaged_file_is_not_resumed(name: str, stopped: Path, trimtab: Trimtab) -> None:
    file, content, says = DOCUMENTS[name]
    (stopped / file).write_bytes(content)
    done = trimtab("resume", str(stopped))
    assert done.code == 2, done.err
    assert all(part in done.err for part in says), done.err
    assert "unexpected" not in done.err


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("batch_size: 16", "batch_size: 3", "training.batch_size is 3, and the run began with 16"),
        ("max_steps: 1", "max_steps: 5", "training.max_steps is 5, and the run began with 1"),
        ("threads: 1", "threads: 2", "machine.threads is 2, and the run began with 1"),
    ],
)
def test_a_run_whose_job_was_edited_is_not_resumed(
    old: str, new: str, says: str, stopped: Path, trimtab: Trimtab
) -> None:
    job = (stopped / "job.yaml").read_text(encoding="utf-8")
    assert old in job
    (stopped / "job.yaml").write_text(job.replace(old, new), encoding="utf-8")
    before = state(stopped)
    refused(trimtab("resume", str(stopped)), (says, "trimtab train", "--output NEW_RUN"), before, stopped)


def test_a_run_whose_data_moved_goes_on_by_its_new_path(
    stopped: Path, trimtab: Trimtab, home: Path, tmp_path: Path
) -> None:
    shutil.copy(home / "f.csv", tmp_path / "moved.csv")
    job = (stopped / "job.yaml").read_text(encoding="utf-8")
    (stopped / "job.yaml").write_text(job.replace(str(home / "f.csv"), str(tmp_path / "moved.csv")), encoding="utf-8")
    done = trimtab("resume", str(stopped))
    assert done.code == 0, done.err


def test_a_run_stopped_before_its_plan_was_written_starts_anew(stopped: Path, trimtab: Trimtab) -> None:
    for name in ("plan.json", "task.json", "data.json", "events.jsonl"):
        (stopped / name).unlink()
    shutil.rmtree(stopped / "checkpoints")
    shutil.rmtree(stopped / "model")
    done = trimtab("resume", str(stopped))
    assert done.code == 0, done.err
    assert [event["kind"] for event in Run.open(stopped).events()][:3] == ["data", "start", "plan"]
    assert (stopped / "model" / "model.safetensors").is_file()


def test_foreign_lines_among_the_events_are_passed_over(stopped: Path, trimtab: Trimtab) -> None:
    events = (stopped / "events.jsonl").read_bytes()
    (stopped / "events.jsonl").write_bytes(b'garbage\n[1]\n{"a": 1}\n\0\0\n' + events)
    done = trimtab("resume", str(stopped))
    assert done.code == 0, done.err
    listed = json.loads(trimtab("runs", str(stopped.parent), "--json").out)["runs"]
    assert [run["status"] for run in listed] == ["done"]


# -------------------------------------------------------------------------------------------------------------- using

INPUTS: dict[str, tuple[str, bytes, tuple[str, ...], tuple[str, ...]]] = {
    "an encoding that there is not": ("bert", b"a", ("--encoding", "klingon"), ("no text encoding 'klingon'", "gbk")),
    "an encoding that is none of text": ("bert", b"a", ("--encoding", "base64"), ("no text encoding 'base64'",)),
    "bytes of another encoding": ("bert", b"\xff\xfe", (), ("not utf-8", "0xff", "--encoding gbk")),
    "a column named twice": ("bert", b"text,text\na,b\n", ("--format", "csv"), (":1:", "'text' twice", "Rename")),
    "other columns": ("bert", b"foo,bar\na,b\n", ("--format", "csv"), ("no column 'text'", "foo, bar")),
    "no message": ("llama", b'{"messages": []}\n', (), ("input 1", "role and a content")),
    "messages that are text": ("llama", b'{"messages": "who"}\n', (), ("input 1", "role and a content")),
    "a message that is a number": ("llama", b'{"messages": [5]}\n', (), ("input 1", "role and a content")),
    "a message without content": ("llama", b'{"messages": [{"role": "user"}]}\n', (), ("role and a content",)),
    "no prompt": ("llama", b'{"foo": "who"}\n', (), ("input 1 has neither `messages`",)),
    "JSON cut off": ("bert", b'{"text": "a"}\n{"text": "b"\n', (), ("standard input:2:", "not valid JSON")),
}


@pytest.mark.parametrize("name", INPUTS)
def test_bad_input_to_predict_is_refused(name: str, runs: dict[str, Path], trimtab: Trimtab, home: Path) -> None:
    model, stdin, words, says = INPUTS[name]
    before = state(home)
    refused(trimtab("predict", str(runs[model]), "-", *words, stdin=stdin), says, before, home)


def test_a_closed_standard_input_is_said(
    runs: dict[str, Path], trimtab: Trimtab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    refused(trimtab("predict", str(runs["bert"]), "-"), ("standard input is closed", "--text"), state(home), home)


# ------------------------------------------------------------------------------------------------------- interruption


def test_a_model_half_saved_by_a_killed_process_is_cleared_by_the_next_saving(stopped: Path, trimtab: Trimtab) -> None:
    mine = stopped / ".model-notes"
    for folder in (stopped / ".model-0123abcd", stopped / ".model-old-0123abcd", mine):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    done = trimtab("resume", str(stopped))
    assert done.code == 0, done.err
    assert [path for path in stopped.iterdir() if path.name.startswith(".")] == [mine]


def test_two_starts_without_a_name_get_two_runs(
    home: Path, tmp_path: Path, trimtab: Trimtab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimtab import api, assembly
    from trimtab.jobfile import job_from_flags

    monkeypatch.chdir(tmp_path)
    settings = {"model.path": str(home / "bert"), "data.train": str(home / "f.csv"), "training.max_steps": "1"}
    job = job_from_flags(settings | {"machine.precision": "fp32", "machine.device": "cpu", "machine.threads": "1"})
    assemble = assembly.assemble

    def slower(*words: Any, **named: Any) -> Any:
        monkeypatch.setattr(assembly, "assemble", assemble)
        api.train(job)  # another start that is quicker
        return assemble(*words, **named)

    monkeypatch.setattr(assembly, "assemble", slower)
    assert api.train(job).path.name == "bert-f-2"
    assert [run.status for run in list_runs(tmp_path / "runs")] == ["done", "done"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for child processes")
def test_ctrl_c_while_modules_load_leaves_without_a_traceback(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'trimtab.cli.app': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from trimtab.cli import main\n"
        "main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "error: interrupted.\n")
