"""A plain loop with accelerate, as its documentation shows it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from task import Collator, load_examples, load_model, read_task
from torch.utils.data import DataLoader
from transformers import get_scheduler


def main() -> None:
    task = read_task()
    window = task.window()
    torch.manual_seed(task.seed)
    examples, tokenizer = load_examples(task)
    model = load_model(task)
    accelerator = Accelerator(mixed_precision="bf16" if task.bf16 else "no", cpu=True)
    loader = DataLoader(examples, batch_size=task.batch_size, collate_fn=Collator(tokenizer, task.kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, fused=True)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=task.steps)
    window.watch_optimizers()
    window.watch_forwards(model)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    window.ready()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        window.losses.append(float(loss.detach()))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if window.done == task.steps:
            window.finish()


if __name__ == "__main__":
    main()
