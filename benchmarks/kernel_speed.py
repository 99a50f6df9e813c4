"""Real tokens per CPU second of Trimtab's kernels against the loop that most trainers run, interleaved in one process.

    python benchmarks/kernel_speed.py classify --model FOLDER --threads 1
    python benchmarks/kernel_speed.py instruct --tokenizer FOLDER --threads 1

The plain loop is what `transformers.Trainer` does inside: random batches padded to their longest example, autocast,
`forward(labels=...)`, clipping, fused AdamW. The data are docstrings of installed packages, so nothing is downloaded.
Each variant runs the same batches in turn; the medians of the rounds are printed with their ratio to the plain loop.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from trimtab.data.batches import Batch, collate
from trimtab.data.task import IGNORED, TaskSpec
from trimtab.models.objective import build_objective
from trimtab.parallel.strategy import OneDevice
from trimtab.train.optim import OptimizerSettings

MODULES = {
    "stdlib": "argparse ast asyncio collections csv datetime decimal email inspect json logging os pathlib random "
    "socket ssl statistics subprocess tarfile tempfile threading typing unittest uuid zipfile",
    "torch": "torch torch.nn torch.nn.functional torch.optim torch.distributions torch.utils.data",
    "numpy": "numpy numpy.linalg numpy.random numpy.ma",
    "pyarrow": "pyarrow pyarrow.compute pyarrow.parquet",
}
SETTINGS = OptimizerSettings(learning_rate=1e-5, weight_decay=0.01)


def docstrings() -> list[tuple[str, str, int]]:
    """(name, docstring, library number), each docstring once."""
    found: dict[str, tuple[str, int]] = {}
    for number, names in enumerate(MODULES.values()):
        for name in names.split():
            for owner in _owners(importlib.import_module(name)):
                for key, value in vars(owner).items():
                    text = inspect.getdoc(value) if callable(value) else None
                    if text and len(text) > 20:
                        found.setdefault(text, (key, number))
    return [(name, text, number) for text, (name, number) in found.items()]


def _owners(module: Any) -> list[Any]:
    return [module, *(value for value in vars(module).values() if inspect.isclass(value))]


@dataclass
class Texts:
    """A token store in memory."""

    spec: TaskSpec
    ids: list[np.ndarray]
    targets: list[Any]
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = np.array([len(ids) for ids in self.ids], dtype=np.int32)

    def input_ids(self, index: int) -> np.ndarray:
        return self.ids[index]

    def token_types(self, index: int) -> np.ndarray | None:
        return None

    def labels(self, index: int) -> Any:
        return self.targets[index]


@dataclass(frozen=True)
class Case:
    """A model maker with its data."""

    make_model: Callable[[], nn.Module]
    texts: Texts
    batch_size: int
    pad_id: int


def classify_case(folder: str) -> Case:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = docstrings()
    ids = tokenizer([text for _, text, _ in rows], truncation=True, max_length=256)["input_ids"]
    texts = Texts(TaskSpec("classification", ("text",)), _arrays(ids), [number for _, _, number in rows])
    labels = len(MODULES)
    return Case(
        lambda: AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels),
        texts,
        16,
        tokenizer.pad_token_id,
    )


def instruct_case(folder: str) -> Case:
    """A 31 M Llama from its config, loss on the answer only."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = docstrings()
    prompts = tokenizer([f"Document the function `{name}`.\n" for name, _, _ in rows])["input_ids"]
    answers = tokenizer([text for _, text, _ in rows], truncation=True, max_length=500)["input_ids"]
    ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    targets = [
        np.array([IGNORED] * len(prompt) + answer, dtype=np.int32)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    texts = Texts(TaskSpec("instruction", ("messages",)), _arrays(ids), targets)
    return Case(lambda: AutoModelForCausalLM.from_config(copy.deepcopy(config)), texts, 8, 0)


def _arrays(ids: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in ids]


class PlainLoop:
    """What transformers.Trainer does with a batch."""

    def __init__(self, case: Case, autocast: bool) -> None:
        self.case, self.autocast = case, autocast
        self.model = case.make_model().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, indices: np.ndarray) -> None:
        batch = collate(self.case.texts, indices, layout="padded", pad_id=self.case.pad_id)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            output = self.model(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=self._labels(batch)
            )
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _labels(self, batch: Batch) -> Tensor:
        if batch.target_positions is None:
            return batch.targets
        labels = torch.full_like(batch.input_ids, IGNORED).flatten()
        labels[batch.target_positions + 1] = batch.targets
        return labels.view_as(batch.input_ids)


class TrimtabLoop:
    """Trimtab's objective and strategy on the same batches."""

    def __init__(self, case: Case, precision: Any, layout: Any = "flat") -> None:
        self.case = case
        model = case.make_model().train()
        self.objective = build_objective(model, case.texts.spec, layout=layout, pad_id=case.pad_id)
        self.strategy = OneDevice(
            self.objective, device=torch.device("cpu"), precision=precision, settings=SETTINGS, max_grad_norm=1.0
        )

    def step(self, indices: np.ndarray) -> None:
        ordered = indices[np.argsort(-self.case.texts.lengths[indices], kind="stable")]
        batch = collate(self.case.texts, ordered, layout=self.objective.layout, pad_id=self.case.pad_id)
        self.strategy.run_group([batch], float(batch.target_tokens), [0])
        self.strategy.apply(1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("classify", "instruct"))
    parser.add_argument("--model", help="folder of an encoder with its tokenizer")
    parser.add_argument("--tokenizer", help="folder of a tokenizer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--grouped", action="store_true", help="batches of similar length for every variant")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = classify_case(options.model) if options.case == "classify" else instruct_case(options.tokenizer)
    print(json.dumps(measure(case, options.steps, options.rounds, options.grouped), indent=1))


def measure(case: Case, steps: int, rounds: int, grouped: bool) -> dict[str, Any]:
    """Median tokens per CPU second of each variant, and the median of its rounds' ratios to each plain loop."""
    loops: dict[str, PlainLoop | TrimtabLoop] = {
        "plain fp32": PlainLoop(case, autocast=False),
        "plain bf16": PlainLoop(case, autocast=True),
        "trimtab fp32": TrimtabLoop(case, "fp32"),
        "trimtab bf16_weights": TrimtabLoop(case, "bf16_weights"),
    }
    batches = _batches(case, steps, grouped)
    tokens = int(sum(case.texts.lengths[batch].sum() for batch in batches))
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds + 1):
        for name, loop in loops.items():
            seconds = _seconds(loop, batches if turn else batches[:1])
            if turn:
                rates[name].append(tokens / seconds)
    lengths = case.texts.lengths
    return {
        "tokens": tokens,
        "median_length": float(np.median(lengths)),
        "mean_length": float(lengths.mean()),
        "tokens_per_cpu_second": {name: round(statistics.median(values)) for name, values in rates.items()},
        "ratio_to_plain": {
            f"{name} / {base}": round(
                statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True)), 2
            )
            for name in ("trimtab fp32", "trimtab bf16_weights")
            for base in ("plain fp32", "plain bf16")
        },
    }


def _batches(case: Case, steps: int, grouped: bool) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    order = generator.permutation(len(case.texts.lengths))
    if grouped:
        window = order[: case.batch_size * 50]
        order = window[np.argsort(-case.texts.lengths[window], kind="stable")]
        blocks = order.reshape(-1, case.batch_size)
        return list(blocks[generator.permutation(len(blocks))][:steps])
    return [order[i * case.batch_size : (i + 1) * case.batch_size] for i in range(steps)]


def _seconds(loop: PlainLoop | TrimtabLoop, batches: list[np.ndarray]) -> float:
    """CPU seconds of the process; with several threads the wall clock, which is what a user waits for."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for batch in batches:
        loop.step(batch)
    return clock() - start


if __name__ == "__main__":
    main()
