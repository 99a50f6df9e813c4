"""Small model folders made on the spot from random weights, with real tokenizers: what the model tests load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trimtab.data.task import TaskSpec

WORDS = [
    "the", "cat", "sat", "on", "a", "mat", "dog", "runs", "fast", "good", "bad", "film", "was", "not", "very",
    "nice", "hello", "who", "are", "you", "i", "am", "trim",
]  # fmt: skip
CLASSES = TaskSpec("classification", ("text",), ("label",), ("bad", "good", "so-so"))
VALUE = TaskSpec("regression", ("text",), ("score",))
TAGS = TaskSpec("token_classification", ("words",), ("tags",), ("O", "B-X", "I-X"))
CHAT = TaskSpec("instruction", ("messages",), chat_format="messages")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def bert_tokenizer(folder: Path) -> int:
    """WordPiece with BERT's special tokens; returns the size of its vocabulary."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *WORDS,
        *letters[1:],
        *(f"##{c}" for c in letters),
        ".",
        ",",
    ]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    return len(vocabulary)


def bytes_tokenizer(folder: Path, *, template: str | None = CHATML, **settings: Any) -> int:
    """Byte-level BPE without merges, with ChatML's tokens; returns the size of its vocabulary."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **settings},
    )
    return len(pieces)


def save_bert(folder: Path, **changes: Any) -> Path:
    """A random BertModel without a head."""
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = bert_tokenizer(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(**{"vocab_size": vocabulary, **SIZES, **changes})).save_pretrained(folder)
    return folder


def save_llama(folder: Path, **changes: Any) -> Path:
    """A random LlamaForCausalLM that speaks ChatML."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = bytes_tokenizer(folder)
    ends = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None}
    settings = {"vocab_size": vocabulary, **SIZES, "num_key_value_heads": 2, **ends, **changes}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.update(changes)
    _write(path, {key: value for key, value in config.items() if value is not None})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
