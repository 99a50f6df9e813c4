"""transformers.Trainer with its own defaults; `--precision bf16` and `--order grouped` are its tuned forms."""

from __future__ import annotations

from typing import Any

from task import Collator, load_examples, load_model, read_task
from transformers import Trainer, TrainerCallback, TrainingArguments
from window import Window


class Losses(TrainerCallback):
    """Notes the loss of every step. Its hook is named by transformers."""

    def __init__(self, window: Window) -> None:
        self.window = window

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.window.losses.append(float(logs["loss"]))


def main() -> None:
    task = read_task()
    window = task.window()
    examples, tokenizer = load_examples(task)
    model = load_model(task)
    arguments = TrainingArguments(
        output_dir=str(task.scratch),
        per_device_train_batch_size=task.batch_size,
        max_steps=task.steps,
        learning_rate=task.learning_rate,
        seed=task.seed,
        bf16=task.bf16,
        use_cpu=True,
        # The order lies in the file, so that all contenders see the same batches.
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        data_collator=Collator(tokenizer, task.kind),
        callbacks=[Losses(window)],
    )
    window.watch_optimizers()
    window.watch_forwards(model)
    window.ready()
    trainer.train()
    window.finish()


if __name__ == "__main__":
    main()
