"""A job from its files to a finished model, on the Python API, with tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import save_bert, save_llama
from safetensors.torch import load_file

import trimtab
from trimtab import api
from trimtab.errors import Interrupted, JobError, RunError, TrimtabError
from trimtab.events import steps_of
from trimtab.jobfile import job_from_flags

WORDS = ("red", "green", "blue", "cat", "dog", "bird", "runs", "jumps", "sleeps", "big", "small", "old", "now")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data."""
    folder = tmp_path_factory.mktemp("api")
    save_bert(folder / "bert")
    save_llama(folder / "llama")
    lines = ["text,label"]
    for n in range(60):
        length = 2 + (n * 7) % 23
        lines.append(
            f"{'good' if n % 2 else 'bad'} {n} {' '.join(WORDS[(n + i) % len(WORDS)] for i in range(length))},"
        )
        lines[-1] += "yes" if n % 2 else "no"
    (folder / "films.csv").write_text("\n".join(lines), encoding="utf-8")
    chats = [{"prompt": f"say {n}", "completion": f"{' '.join(WORDS[: 1 + n % 9])} {n}"} for n in range(24)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))


def flags(home: Path, output: Path, kind: str = "classification", **changes: str) -> dict[str, str]:
    chat = kind == "instruction"
    settings = {
        "model.path": str(home / ("llama" if chat else "bert")),
        "data.train": str(home / ("chats.jsonl" if chat else "films.csv")),
        "data.eval_fraction": "0.2",
        "model.dropout": "0.0",
        "training.batch_size": "8",
        "training.epochs": "2",
        "training.learning_rate": "0.01",
        "machine.precision": "fp32",
        "machine.threads": "1",
        "output.run": str(output),
    }
    return {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}


def train(home: Path, output: Path, kind: str = "classification", **changes: str) -> trimtab.Run:
    settings = flags(home, output, kind, **changes)
    if kind == "instruction":
        del settings["model.dropout"]  # the tiny Llama has none, and a setting without effect is an error
    return api.train(job_from_flags(settings))


def losses(run: trimtab.Run) -> list[float]:
    return [event["loss"] for event in steps_of(run.events())]


@pytest.mark.parametrize("kind", ["classification", "instruction"])
def test_micro_batches_do_not_change_the_losses(home: Path, tmp_path: Path, kind: str) -> None:
    whole = losses(train(home, tmp_path / "all", kind))
    for size in ("1", "2", "5"):
        assert losses(train(home, tmp_path / size, kind, machine__micro_batch=size)) == pytest.approx(whole, rel=1e-5)


def test_a_run_leaves_model_plan_report_and_events(home: Path, tmp_path: Path) -> None:
    run = train(home, tmp_path / "run")
    assert run.status == "done"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        path.name for path in run.model_path.iterdir()
    }
    kinds = [event["kind"] for event in run.events()]
    assert kinds[:3] == ["data", "start", "plan"] and kinds[-1] == "done"
    assert {line["name"] for line in run.read("plan")["settings"]} >= {"precision", "learning rate", "micro-batch"}
    assert run.metrics["accuracy"] >= 0
    assert not [path for path in run.path.rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]


def test_learning_happens_and_predictions_agree_with_it(home: Path, tmp_path: Path) -> None:
    run = train(home, tmp_path / "run", training__epochs="12")
    assert run.metrics["accuracy"] == 1.0
    texts = ["good 7 cat runs", "bad 8 bird sleeps here now", "good dog"]
    answers = list(trimtab.load(run.path).predict(texts))
    assert [answer["label"] for answer in answers] == ["yes", "no", "yes"]
    assert all(abs(sum(answer["probabilities"].values()) - 1) < 1e-5 for answer in answers)


def test_the_model_is_an_ordinary_folder(home: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = train(home, tmp_path / "run")
    model = AutoModelForSequenceClassification.from_pretrained(run.model_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.model_path)
    with torch.inference_mode():
        shares = model(**tokenizer("good cat", return_tensors="pt")).logits.softmax(-1)[0]
    ours = next(iter(trimtab.load(run.path).predict(["good cat"])))["probabilities"]
    assert ours == pytest.approx({model.config.id2label[at]: float(share) for at, share in enumerate(shares)}, abs=1e-5)


def stop_after(steps: int) -> Any:
    """A listener that asks the process to stop, as Ctrl-C does, once a step is done."""
    import os
    import signal

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == steps:
            os.kill(os.getpid(), signal.SIGINT)

    return listen


@pytest.mark.parametrize("stop_at", [1, 3, 6, 11])
@pytest.mark.parametrize("kind", ["classification", "instruction"])
def test_an_interrupted_and_resumed_run_ends_bit_for_bit_the_same(
    home: Path, tmp_path: Path, kind: str, stop_at: int
) -> None:
    changes: dict[str, str] = {"data__eval_fraction": "0"}
    if kind == "classification":
        changes["model__dropout"] = "0.1"
    else:
        changes |= {"method__kind": "lora", "method__rank": "4", "method__dropout": "0.1", "training__epochs": "4"}
    whole = train(home, tmp_path / "whole", kind, **changes)
    settings = flags(home, tmp_path / "cut", kind, **changes)
    if kind == "instruction":
        del settings["model.dropout"]
    with pytest.raises(Interrupted, match="trimtab resume"):
        api.train(job_from_flags(settings), listener=stop_after(stop_at))
    stopped = trimtab.Run.open(tmp_path / "cut")
    assert stopped.status == "interrupted"
    resumed = api.resume(tmp_path / "cut")
    assert losses(resumed) == losses(whole)
    name = "adapter_model.safetensors" if kind == "instruction" else "model.safetensors"
    ours, theirs = load_file(resumed.model_path / name), load_file(whole.model_path / name)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs) and ours.keys() == theirs.keys()


def test_a_finished_run_is_not_resumed(home: Path, tmp_path: Path) -> None:
    run = train(home, tmp_path / "run")
    with pytest.raises(RunError, match="is finished"):
        api.resume(run.path)


def test_resume_refuses_other_data(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "films.csv"
    data.write_bytes((home / "films.csv").read_bytes())
    settings = flags(home, tmp_path / "cut", data__train=str(data))
    with pytest.raises(Interrupted):
        api.train(job_from_flags(settings), listener=stop_after(2))
    data.write_text(data.read_text(encoding="utf-8").replace("good 7", "good 8"), encoding="utf-8")
    with pytest.raises(RunError, match=r"are not those that .* began with"):
        api.resume(tmp_path / "cut")


def test_evaluation_on_other_files_matches_the_runs_own(home: Path, tmp_path: Path) -> None:
    run = train(home, tmp_path / "run", data__eval=str(home / "films.csv"), data__eval_fraction="0.1")
    measured = api.evaluate(run.path, [str(home / "films.csv")])
    assert measured["loss"] == pytest.approx(run.metrics["loss"], rel=1e-4)
    assert measured["accuracy"] == run.metrics["accuracy"]


@pytest.mark.parametrize("method", ["full", "lora", "last_layers"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_weights", "bf16"])
def test_every_method_and_precision_trains_and_is_read_back(
    home: Path, tmp_path: Path, method: str, precision: str
) -> None:
    run = train(home, tmp_path / "run", method__kind=method, machine__precision=precision, training__max_steps="4")
    answer = next(iter(trimtab.load(run.path).predict(["good cat"])))
    assert answer["label"] in ("yes", "no")


def test_frozen_weights_are_the_base_models_own_after_bf16(home: Path, tmp_path: Path) -> None:
    run = train(
        home,
        tmp_path / "run",
        method__kind="last_layers",
        method__last_layers="0",
        machine__precision="bf16_weights",
        training__max_steps="4",
    )
    base, tuned = load_file(home / "bert" / "model.safetensors"), load_file(run.model_path / "model.safetensors")
    kept = [name for name in tuned if name.removeprefix("bert.") in base and "pooler" not in name]
    assert kept and all(torch.equal(tuned[name], base[name.removeprefix("bert.")]) for name in kept)


def test_the_best_weights_are_kept_not_the_last(home: Path, tmp_path: Path) -> None:
    run = train(
        home, tmp_path / "run", training__learning_rate="0.05", training__epochs="6", training__best_metric="loss"
    )
    evals = [event for event in run.events() if event["kind"] == "eval"]
    best = min(evals, key=lambda event: event["metrics"]["loss"])
    done = list(run.events())[-1]
    assert done["best_step"] == best["step"]
    assert done["metrics"] == best["metrics"] == run.metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task__class_weights": "[1.0, 2.0, 3.0]"}, r"class_weights needs 2 numbers.*it has 3"),
        ({"training__warmup": "5000"}, r"warmup is 5000 steps, but the run has only 12"),
        ({"training__best_metric": "acuracy"}, r"accuracy"),
        ({"machine__device": "cuda:7"}, r"cuda"),
        ({"machine__precision": "fp16"}, r"fp16.*does not have"),
        ({"method__kind": "lora", "method__target_modules": "[qerry]"}, r"query"),
        ({"training__max_length": "9999"}, r"9,?999.*positions"),
    ],
)
def test_settings_that_cannot_work_are_refused_and_nothing_is_written(
    home: Path, tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(TrimtabError, match=message):
        train(home, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_class_weights_have_no_effect_on_language_and_are_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no effect"):
        train(home, tmp_path / "run", "instruction", task__class_weights="balanced")


def test_class_weights_change_the_loss_and_not_its_dependence_on_micro_batches(home: Path, tmp_path: Path) -> None:
    plain = losses(train(home, tmp_path / "plain", training__max_steps="3"))
    weighted = {"task__class_weights": "[1.0, 5.0]", "training__max_steps": "3"}
    whole = losses(train(home, tmp_path / "whole", **weighted))
    assert losses(train(home, tmp_path / "cut", machine__micro_batch="1", **weighted)) == pytest.approx(whole, rel=1e-5)
    assert plain != whole


def test_label_smoothing_is_for_training_and_not_for_what_is_measured(home: Path, tmp_path: Path) -> None:
    plain = train(home, tmp_path / "plain", training__max_steps="1", training__learning_rate="1e-9")
    smooth = {"task__label_smoothing": "0.3", "training__max_steps": "1", "training__learning_rate": "1e-9"}
    smoothed = train(home, tmp_path / "smoothed", **smooth)
    assert smoothed.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-5)
    assert losses(smoothed) != losses(plain)


def test_a_resumed_run_says_nothing_of_before_unless_that_was_measured(home: Path, tmp_path: Path) -> None:
    settings = flags(home, tmp_path / "cut", training__eval_every="1")
    with pytest.raises(Interrupted):
        api.train(job_from_flags(settings), listener=stop_after(2))
    card = (api.resume(tmp_path / "cut").model_path / "README.md").read_text(encoding="utf-8")
    assert "| metric | after |" in card


def test_resume_refuses_other_evaluation_data(home: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.csv"
    held.write_text("text,label\ngood one,yes\nbad one,no\n", encoding="utf-8")
    settings = flags(home, tmp_path / "cut", data__eval=str(held), data__eval_fraction="0.1")
    with pytest.raises(Interrupted):
        api.train(job_from_flags(settings), listener=stop_after(2))
    held.write_text("text,label\ngood two,yes\nbad one,no\n", encoding="utf-8")
    with pytest.raises(RunError, match=r"are not those that .* began with"):
        api.resume(tmp_path / "cut")
    assert trimtab.Run.open(tmp_path / "cut").status == "interrupted"


def test_a_weighted_loss_is_measured_alike_in_training_and_later(home: Path, tmp_path: Path) -> None:
    films = str(home / "films.csv")
    run = train(home, tmp_path / "run", data__eval=films, data__eval_fraction="0.1", task__class_weights="[1.0, 5.0]")
    assert api.evaluate(run.path, [films])["loss"] == pytest.approx(run.metrics["loss"], rel=1e-4)


def test_nothing_else_trains_a_run_while_its_model_is_written(home: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def look(event: dict[str, Any]) -> None:
        if event["kind"] == "done":
            with pytest.raises(RunError) as caught:
                api.resume(tmp_path / "run")
            refused.append(str(caught.value))

    api.train(job_from_flags(flags(home, tmp_path / "run", training__max_steps="1")), listener=look)
    assert refused and "is being trained by process" in refused[0]


def test_a_run_goes_on_where_its_device_is_missing(home: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the device that the run shall miss is here")
    whole = train(home, tmp_path / "whole")
    with pytest.raises(Interrupted):
        api.train(job_from_flags(flags(home, tmp_path / "cut")), listener=stop_after(5))
    run = trimtab.Run.open(tmp_path / "cut")
    plan = run.read("plan")
    run.write("plan", plan | {"compute": plan["compute"] | {"device": "cuda:0", "threads": None}})
    resumed = api.resume(run.path)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    assert any("not bit for bit" in event.get("message", "") for event in resumed.events())


def test_a_new_regression_head_begins_at_the_mean_of_the_targets(home: Path, tmp_path: Path) -> None:
    rows = [f"good {n} {' '.join(WORDS[: n % 7])},{50 + n % 5}" for n in range(40)]
    (tmp_path / "scores.csv").write_text("\n".join(["text,score", *rows]), encoding="utf-8")
    settings = flags(home, tmp_path / "run", data__train=str(tmp_path / "scores.csv"), training__max_steps="1")
    settings |= {"task.kind": "regression", "training.learning_rate": "1e-9"}
    run = api.train(job_from_flags(settings))
    assert run.metrics["mae"] < 3


def test_a_language_that_the_tokenizer_does_not_know_is_said(home: Path, tmp_path: Path) -> None:
    rows = [f"这部电影很{'好' if n % 2 else '差'}{n},{'yes' if n % 2 else 'no'}" for n in range(40)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    run = train(home, tmp_path / "run", data__train=str(tmp_path / "films.csv"), training__max_steps="1")
    assert any("unknown to this model's tokenizer" in event.get("message", "") for event in run.events())
