"""Models, a tokenizer and data made on the spot, for a machine without the internet.

Texts are docstrings of the standard library. The tokenizer is a byte-pair encoding trained on them; the models have
random weights.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))

import sources

KINDS = ("classification", "instruction")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>")


@dataclass(frozen=True)
class Sizes:
    """How large the models and the data are."""

    hidden: int
    layers: int
    inner: int
    heads: int
    vocabulary: int
    positions: int
    rows: int


FULL = Sizes(hidden=1024, layers=16, inner=4096, heads=16, vocabulary=16_000, positions=1024, rows=1024)
"""About 220 million weights as an encoder, 290 million as a decoder."""
QUICK = Sizes(hidden=64, layers=2, inner=128, heads=4, vocabulary=600, positions=256, rows=48)


@dataclass(frozen=True)
class Made:
    """Folders and files of one task."""

    kind: str
    model: str
    rows: str


def make(kind: str, folder: Path, sizes: Sizes) -> Made:
    """Model folder and rows of one task below `folder`; what lies there already is used again."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / f"{kind}.jsonl"
    model = folder / f"{kind}-model"
    if not rows.is_file():
        rows.write_text("".join(json.dumps(row) + "\n" for row in make_rows(kind, sizes.rows)), encoding="utf-8")
    if not (model / "config.json").is_file():
        texts = [" ".join(str(value) for value in json.loads(line).values()) for line in rows.open(encoding="utf-8")]
        make_model(kind, model, sizes, texts)
    return Made(kind, str(model), str(rows))


def make_rows(kind: str, count: int) -> list[dict[str, str]]:
    """Classification: docstrings of functions and of classes. Instruction: a function and its docstring."""
    found = _classified() if kind == "classification" else _pairs()
    return list(islice(found, count))


def _classified() -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    for text, node in sources.documented("stdlib"):
        if text not in seen:
            seen.add(text)
            yield {"text": text, "label": "class" if isinstance(node, ast.ClassDef) else "function"}


def _pairs() -> Iterator[dict[str, str]]:
    seen: set[str] = set()
    for text, node in sources.documented("stdlib"):
        if isinstance(node, ast.ClassDef) or len(node.body) < 2 or text in seen:
            continue
        seen.add(text)
        yield {"prompt": sources.prompt_for(node), "completion": text}


def make_model(kind: str, folder: Path, sizes: Sizes, texts: list[str]) -> None:
    """Writes a BERT with a head for two classes, or a Llama, with its tokenizer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(kind, texts, sizes)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "max_position_embeddings": sizes.positions,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    if kind == "classification":
        model = BertForSequenceClassification(BertConfig(**shape, num_labels=2))
    else:
        shape |= {"num_key_value_heads": max(1, sizes.heads // 4), "tie_word_embeddings": True}
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        model = LlamaForCausalLM(LlamaConfig(**shape, **ids))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def train_tokenizer(kind: str, texts: list[str], sizes: Sizes) -> Any:
    """A byte-level byte-pair tokenizer; the encoder's wraps a text in [CLS] and [SEP]."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": sizes.positions}
    if kind == "instruction":
        return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", **names)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    wrapped = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **wrapped, **names)
