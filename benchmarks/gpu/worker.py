"""Trains once, with Trimtab or with a plain transformers.Trainer, and tells tokens, seconds, losses and peak bytes.

`python benchmarks/gpu/worker.py CASE.json RESULT.json` runs one case in a process of its own, so that the peak of one
case is not that of another.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers" / "contenders"))

from window import Mark, Window


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str
    engine: str
    """`trimtab` or `trainer`."""
    kind: str
    model: str
    rows: str
    device: str
    precision: str
    batch_size: int
    max_length: int
    steps: int
    warmup: int
    method: str = "full"
    card_bytes: int | None = None
    """Imitates a card of this size by a share of the memory of the one that is there."""


def run_case(case: Case) -> dict[str, Any]:
    """The case with what was measured. Out of memory is a result (`error`), whatever else fails is an error."""
    import torch

    card = case.device.startswith("cuda")
    if card:
        _imitate(case)
        torch.cuda.reset_peak_memory_stats()
    window = _SynchronousWindow(case.steps, warmup=case.warmup, card=card)
    try:
        more = (_trimtab if case.engine == "trimtab" else _trainer)(case, window)
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {**asdict(case), "error": f"out of memory: {str(error).splitlines()[0]}"}
    measured = window.document(losses=window.losses, **more)
    measured["tokens_per_second"] = measured["tokens"] / measured["wall_seconds"]
    if card:
        measured["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        measured["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return {**asdict(case), **measured}


def _imitate(case: Case) -> None:
    import torch

    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    share = 1.0 if case.card_bytes is None else min(1.0, case.card_bytes / total)
    torch.cuda.set_per_process_memory_fraction(share)


class _SynchronousWindow(Window):
    """A window whose clocks wait for the card."""

    def __init__(self, steps: int, *, warmup: int, card: bool) -> None:
        super().__init__(steps, warmup=warmup)
        self._card = card

    def mark(self) -> Mark:
        if self._card:
            import torch

            torch.cuda.synchronize()
        return super().mark()


def _trimtab(case: Case, window: Window) -> dict[str, Any]:
    from trimtab import api
    from trimtab.job import Job

    settings: list[dict[str, str]] = []
    warnings: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "plan":
            settings.extend(event["settings"])
        elif event["kind"] == "warning":
            warnings.append(event["message"])
        elif event["kind"] == "step":
            window.count(event["tokens"], event["tokens"])
            window.losses.append(event["loss"])
            window.step_done()

    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        api.train(Job.model_validate(_document(case, folder)), listener=listen)
    return {"settings": settings, "warnings": warnings}


def _document(case: Case, folder: str) -> dict[str, Any]:
    columns = {"text": "text", "label": "label"} if case.kind == "classification" else {"template": "plain"}
    return {
        "model": {"path": case.model},
        "data": {"train": case.rows, "eval_fraction": 0.0, **columns},
        "task": {"kind": case.kind},
        "method": {"kind": case.method},
        "training": {
            "batch_size": case.batch_size,
            "epochs": 100.0,
            "max_steps": case.steps,
            "max_length": case.max_length,
            "learning_rate": 1e-4,
        },
        "machine": {"device": case.device, "precision": case.precision},
        "output": {"run": str(Path(folder) / "run")},
    }


def _trainer(case: Case, window: Window) -> dict[str, Any]:
    """The loop that users write: Trainer, batches in a random order, padded to the longest."""
    from task import Collator
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Losses(TrainerCallback):
        """Its hook is named by transformers."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            window.step_done()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                told.append(float(logs["loss"]))

    told: list[float] = []
    model, examples, tokenizer = _load(case)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.batch_size,
            max_steps=case.steps,
            learning_rate=1e-4,
            fp16=case.precision == "fp16",
            bf16=case.precision == "bf16",
            tf32=True if case.precision == "tf32" else None,
            use_cpu=case.device == "cpu",
            # Every log waits for the card; one at the end gives the mean loss of all steps.
            logging_steps=case.steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=examples,
            data_collator=Collator(tokenizer, case.kind),
            callbacks=[Losses()],
        )
        window.watch_forwards(model)
        trainer.train()
    return {"mean_loss": told[0], "final_loss": None}


def _load(case: Case) -> tuple[Any, list[dict[str, Any]], Any]:
    from task import Task, load_examples, load_model

    task = Task(
        folder=Path(case.rows).parent,
        kind=case.kind,
        model=case.model,
        labels=("class", "function"),
        batch_size=case.batch_size,
        max_length=case.max_length,
        steps=case.steps,
        learning_rate=1e-4,
        seed=0,
        order=Path(case.rows).stem,
        precision=case.precision,
        options=frozenset(),
        scratch=Path(),
        result=Path(),
    )
    examples, tokenizer = load_examples(task)
    return load_model(task), examples, tokenizer


def main() -> None:
    case = Case(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    begin = time.monotonic()
    result = run_case(case)
    result["total_seconds"] = time.monotonic() - begin
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
