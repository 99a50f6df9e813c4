"""Lightning's Trainer. `fit` keeps the evaluation mode that `from_pretrained` leaves, so the model is put into training
mode first (`task.load_model`); without it dropout is off and the figures look twice as good."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
from task import Collator, Task, load_examples, load_model, read_task
from torch.utils.data import DataLoader
from transformers import get_scheduler
from window import Window


class Module(lightning.LightningModule):
    """The model with its optimizer."""

    def __init__(self, task: Task, window: Window) -> None:
        super().__init__()
        self.task, self.window = task, window
        self.model = load_model(task)

    def training_step(self, batch: dict[str, Any], _index: int) -> Any:
        loss = self.model(**batch).loss
        self.window.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, _optimizer: Any) -> None:
        # Lightning's own clipping refuses a fused optimizer under bf16-mixed, and the unfused one is slower.
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.task.learning_rate, fused=True)
        schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=self.task.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    task = read_task()
    window = task.window()
    lightning.seed_everything(task.seed, verbose=False)
    examples, tokenizer = load_examples(task)
    module = Module(task, window)
    if not module.model.training:
        raise SystemExit("the model is in evaluation mode")
    loader = DataLoader(examples, batch_size=task.batch_size, collate_fn=Collator(tokenizer, task.kind))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if task.bf16 else "32-true",
        max_steps=task.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(task.scratch),
    )
    window.watch_optimizers()
    window.watch_forwards(module.model)
    window.ready()
    trainer.fit(module, loader)
    window.finish()


if __name__ == "__main__":
    main()
