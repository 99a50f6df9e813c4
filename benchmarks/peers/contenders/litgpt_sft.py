"""LitGPT's full fine-tuning: its default precision, or `bf16-true`, which keeps no float32 master weights.

Its micro-batch of one example is the default, so nothing is padded. The checkpoint has the sizes of the task's model
with LitGPT's own fresh weights; its head is not tied to the embeddings, for it has no such option.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import litgpt.finetune.full as finetune
import torch
import yaml
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import JSON
from litgpt.model import GPT
from litgpt.prompts import Default
from task import Task, read_task
from window import Window


def write_checkpoint(task: Task) -> Path:
    """A LitGPT checkpoint folder with the sizes of a Llama-style transformers folder."""
    source, folder = Path(task.model), task.scratch / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    facts = json.loads((source / "config.json").read_text(encoding="utf-8"))
    sizes: dict[str, Any] = {
        "name": "benchmark",
        "block_size": task.max_length,
        "vocab_size": facts["vocab_size"],
        "padded_vocab_size": facts["vocab_size"],
        "n_layer": facts["num_hidden_layers"],
        "n_head": facts["num_attention_heads"],
        "n_query_groups": facts["num_key_value_heads"],
        "n_embd": facts["hidden_size"],
        "intermediate_size": facts["intermediate_size"],
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
    }
    (folder / "model_config.yaml").write_text(yaml.safe_dump(sizes), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    torch.manual_seed(task.seed)
    # LitGPT reads no other format; the file is made here and read by LitGPT alone.
    torch.save(GPT(Config(**sizes)).state_dict(), folder / "lit_model.pth")
    return folder


def write_dataset(task: Task) -> Path:
    """`train.json`, and the `val.json` that LitGPT asks for and looks at before training."""
    folder = task.scratch / "data"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": row["prompt"] + "\n", "output": row["completion"]} for row in task.rows()]
    (folder / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    (folder / "val.json").write_text(json.dumps(rows[:2]), encoding="utf-8")
    return folder


def watch(window: Window) -> list[float]:
    """Counts tokens of training forwards; the list given back fills with the loss of every micro-batch."""
    losses: list[float] = []
    forward, loss_of = GPT.forward, finetune.chunked_cross_entropy

    def counted(self: GPT, idx: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            window.count(idx.numel(), idx.numel())
        return forward(self, idx, *args, **kwargs)

    def noted(logits: Any, *args: Any, **kwargs: Any) -> Any:
        loss = loss_of(logits, *args, **kwargs)
        if loss.requires_grad:
            losses.append(float(loss.detach()))
        return loss

    GPT.forward = counted
    finetune.chunked_cross_entropy = noted
    return losses


def finish(window: Window, losses: list[float], micro_batches: int) -> None:
    """Leaves before LitGPT writes its checkpoint."""
    starts = range(0, len(losses), micro_batches)
    window.losses = [sum(losses[start : start + micro_batches]) / micro_batches for start in starts]
    window.finish()


def main() -> None:
    task = read_task()
    window = task.window()
    checkpoint, data = write_checkpoint(task), write_dataset(task)
    losses = watch(window)
    window.watch_optimizers()
    window.at_end = lambda: finish(window, losses, task.batch_size)
    window.ready()
    finetune.setup(
        checkpoint_dir=checkpoint,
        out_dir=task.scratch / "output",
        precision="bf16-true" if task.bf16 else None,
        data=JSON(json_path=data, mask_prompt=True, prompt_style=Default(), num_workers=0),
        train=TrainArgs(
            save_interval=10_000,
            log_interval=1,
            global_batch_size=task.batch_size,
            micro_batch_size=1,
            lr_warmup_steps=1,
            epochs=2,
            max_steps=task.steps,
            max_seq_length=task.max_length,
        ),
        eval=EvalArgs(interval=10_000, max_new_tokens=100, max_iters=1, final_validation=False),
        seed=task.seed,
    )


if __name__ == "__main__":
    main()
