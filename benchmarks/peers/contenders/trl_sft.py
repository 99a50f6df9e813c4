"""TRL's SFTTrainer: its defaults, or `padding_free` / `packed`, both without gradient checkpointing."""

from __future__ import annotations

from datasets import Dataset
from packed_rows import packed_rows
from task import load_model, read_task
from trainer import Losses
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    task = read_task()
    window = task.window()
    tuned = bool(task.options)
    packed = "packed" in task.options
    config = SFTConfig(
        output_dir=str(task.scratch),
        # Packed rows hold as many tokens a step as `batch_size` examples do on the average.
        per_device_train_batch_size=packed_rows(task.folder, task.max_length) if packed else task.batch_size,
        max_steps=task.steps,
        learning_rate=task.learning_rate,
        seed=task.seed,
        use_cpu=True,
        train_sampling_strategy="sequential",
        max_length=None if "padding_free" in task.options else task.max_length,
        packing=packed,
        padding_free="padding_free" in task.options,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({"gradient_checkpointing": False} if tuned else {}),
    )
    rows = [{"prompt": row["prompt"] + "\n", "completion": row["completion"]} for row in task.rows()]
    model = load_model(task)
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[Losses(window)],
    )
    window.watch_optimizers()
    window.watch_forwards(model)
    window.ready()
    trainer.train()
    window.finish()


if __name__ == "__main__":
    main()
