"""LLaMA-Factory's `stage: sft`, full fine-tuning: its defaults, or bf16 with neat packing and no checkpointing.

Its list of needs brings CUDA builds of torchvision and torchaudio beside a CPU torch; they are left out of the
environment, and an empty torchaudio stands in for the import in its multi-modal plug-in.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

from packed_rows import packed_rows
from task import Task, read_task
from window import Window


def stand_in(name: str) -> None:
    """An empty module under `name`, for an import whose content is never used."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    sys.modules[name] = module


def write_dataset(task: Task) -> Path:
    """The rows in LLaMA-Factory's form, with the description that it asks for."""
    folder = task.scratch / "data"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": row["prompt"] + "\n", "output": row["completion"]} for row in task.rows()]
    (folder / "pairs.json").write_text(json.dumps(rows), encoding="utf-8")
    description = {"pairs": {"file_name": "pairs.json", "columns": {"prompt": "instruction", "response": "output"}}}
    (folder / "dataset_info.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


def arguments(task: Task) -> dict[str, Any]:
    """The settings that a user would write into its YAML file."""
    packed = "packed" in task.options
    settings: dict[str, Any] = {
        "model_name_or_path": task.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "pairs",
        "dataset_dir": str(write_dataset(task)),
        "template": "empty",
        "cutoff_len": task.max_length,
        "output_dir": str(task.scratch / "output"),
        "per_device_train_batch_size": task.batch_size,
        "max_steps": task.steps,
        "learning_rate": task.learning_rate,
        "seed": task.seed,
        "bf16": task.bf16,
        "use_cpu": True,
        "disable_shuffling": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if packed:
        settings |= {
            "packing": True,
            "neat_packing": True,
            "disable_gradient_checkpointing": True,
            "per_device_train_batch_size": packed_rows(task.folder, task.max_length),
        }
    return settings


def make_callback(window: Window) -> Any:
    """Watches the model from the start of training, and leaves at its end."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Its hooks are named by transformers."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            window.watch_forwards(kwargs["model"])
            window.watch_optimizers()
            window.ready()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                window.losses.append(float(logs["loss"]))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            window.finish()

    return Watch()


def main() -> None:
    task = read_task()
    window = task.window()
    stand_in("torchaudio")
    from llamafactory.train.tuner import run_exp

    run_exp(arguments(task), callbacks=[make_callback(window)])


if __name__ == "__main__":
    main()
