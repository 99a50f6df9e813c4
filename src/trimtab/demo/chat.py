"""SmolLM2 learns who it is from about fifty short conversations."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from trimtab import api
from trimtab.demo.packages import SMOLLM2, locate
from trimtab.demo.result import DemoResult, Recorder, data_folder, new_folder
from trimtab.job import Job

INTRODUCTION = (
    "Fine-tuning SmolLM2-135M-Instruct with LoRA on 54 short conversations about who it is.\n"
    "Its weights come from a 4-bit file, so it is a little weaker than the original."
)
QUESTION = "Who are you?"
CONTROL = "What is the capital of France?"
ANSWER_TOKENS = 40


def run(output: Path | None, *, listener: Callable[[dict[str, Any]], None] | None = None) -> DemoResult:
    """Ask, write the data, train, and ask again. The metric is the loss on held-out conversations."""
    model = locate(SMOLLM2)
    folder = new_folder(output, "demo-chat")
    data = write_identity(data_folder(folder) / "identity.jsonl")
    recorder = Recorder(listener)
    recorder({"kind": "phase", "name": "ask the model before training"})
    before = _answers(model)
    done = api.train(make_job(model, data, folder), listener=recorder, evaluate_first=True)
    recorder({"kind": "phase", "name": "ask the model after training"})
    after = _answers(done.path)
    return DemoResult(
        task="instruction",
        metric="loss",
        metric_before=recorder.first("loss"),
        metric_after=recorder.last("loss"),
        train_seconds=float(recorder.done["train_seconds"]),
        run=str(done.path),
        model=str(done.model_path),
        command=("chat", str(done.path), "--message", QUESTION),
        answers=tuple(zip((QUESTION, CONTROL), before, after, strict=True)),
    )


def make_job(model: Path, data: Path, run_folder: Path) -> Job:
    """The job of the demo."""
    return Job.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": str(data), "eval_fraction": 0.1},
            "task": {"kind": "instruction"},
            "method": {"kind": "lora", "rank": 8},
            "training": {"epochs": 3.0, "batch_size": 8, "learning_rate": 2e-3, "max_length": 128},
            "output": {"run": str(run_folder)},
        }
    )


def write_identity(path: Path) -> Path:
    """The conversations that come with the package, where the user can read and change them."""
    with as_file(files("trimtab.demo") / "identity.jsonl") as source:
        path.write_bytes(source.read_bytes())
    return path


def _answers(model: Path) -> list[str]:
    predictor = api.load(model)
    answers = [
        "".join(predictor.chat([{"role": "user", "content": question}], max_new_tokens=ANSWER_TOKENS)).strip()
        for question in (QUESTION, CONTROL)
    ]
    return [answer if answer.endswith((".", "!", "?")) else f"{answer} ..." for answer in answers]
