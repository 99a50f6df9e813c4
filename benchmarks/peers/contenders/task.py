"""What a contender reads: the task's facts, its rows in the order wanted, and batches for peers that take tensors."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from window import Window

IGNORED = -100


@dataclass(frozen=True)
class Task:
    """One workload as `workloads.py` wrote it, and how this contender shall run it."""

    folder: Path
    kind: str
    """`classification` or `instruction`."""
    model: str
    labels: tuple[str, ...]
    batch_size: int
    max_length: int
    steps: int
    learning_rate: float
    seed: int
    order: str
    """`random` or `grouped`: which of the two files the rows come from."""
    precision: str
    options: frozenset[str]
    scratch: Path
    """A folder for what the contender writes."""
    result: Path

    def window(self) -> Window:
        return Window(self.steps, self.result)

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"

    @property
    def rows_path(self) -> Path:
        return self.folder / f"{self.order}.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        with self.rows_path.open(encoding="utf-8") as stream:
            return [json.loads(line) for line in stream]


def read_task() -> Task:
    """From the command line that the runner gives to every contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--order", choices=["random", "grouped"], default="random")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--option", action="append", default=[])
    given = parser.parse_args()
    facts = json.loads((given.folder / "task.json").read_text(encoding="utf-8"))
    return Task(
        folder=given.folder,
        kind=facts["kind"],
        model=facts["model"],
        labels=tuple(facts["labels"]),
        batch_size=facts["batch_size"],
        max_length=facts["max_length"],
        steps=facts["steps"],
        learning_rate=facts["learning_rate"],
        seed=facts["seed"],
        order=given.order,
        precision=given.precision,
        options=frozenset(given.option),
        scratch=given.scratch,
        result=given.result,
    )


def load_model(task: Task) -> Any:
    """The transformers model with float32 weights, in training mode."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(task.seed)
    if task.kind == "classification":
        model = AutoModelForSequenceClassification.from_pretrained(
            task.model, num_labels=len(task.labels), dtype="float32"
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype="float32")
    model.train()
    return model


def load_examples(task: Task) -> tuple[list[dict[str, Any]], Any]:
    """Tokenised rows in order, and the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task.model)
    rows = task.rows()
    if task.kind == "classification":
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=task.max_length)
        labels = {name: index for index, name in enumerate(task.labels)}
        return [
            {"input_ids": ids, "labels": labels[row["label"]]}
            for ids, row in zip(encoded["input_ids"], rows, strict=True)
        ], tokenizer
    return [_instruction(row, tokenizer, task.max_length) for row in rows], tokenizer


def _instruction(row: dict[str, Any], tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Prompt and completion laid end to end; only the completion and its end count in the loss."""
    prompt = tokenizer(row["prompt"] + "\n", add_special_tokens=False)["input_ids"]
    completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    ids = (prompt + completion + [tokenizer.eos_token_id])[:max_length]
    labels = ([IGNORED] * len(prompt) + completion + [tokenizer.eos_token_id])[:max_length]
    return {"input_ids": ids, "labels": labels}


class Collator:
    """Pads to the longest of the batch."""

    def __init__(self, tokenizer: Any, kind: str) -> None:
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.kind = kind

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        width = max(len(example["input_ids"]) for example in examples)
        ids = torch.full((len(examples), width), self.pad)
        mask = torch.zeros((len(examples), width), dtype=torch.long)
        for row, example in enumerate(examples):
            length = len(example["input_ids"])
            ids[row, :length] = torch.tensor(example["input_ids"])
            mask[row, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": self._labels(examples, width)}

    def _labels(self, examples: list[dict[str, Any]], width: int) -> Any:
        import torch

        if self.kind == "classification":
            return torch.tensor([example["labels"] for example in examples])
        labels = torch.full((len(examples), width), IGNORED)
        for row, example in enumerate(examples):
            labels[row, : len(example["labels"])] = torch.tensor(example["labels"])
        return labels
