"""The tokenizer inside a GGUF file, written as the tokenizer.json and its companions that transformers reads.

Two kinds exist in the families read here: byte-level BPE (`gpt2`) whose splitting rule `tokenizer.ggml.pre` names, and
SentencePiece BPE (`llama`) whose merges follow from the scores of its pieces. The splitting rules are those with which
the models were trained (llama.cpp, src/llama-vocab.cpp, lists the same ones).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from trimtab.errors import ModelError, did_you_mean

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_AND_SPACE
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_AND_SPACE
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_GPT2_RULE = ("gpt-2", "gpt2")
_DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r")
PRE_TOKENIZERS = (*_SPLITS, *_GPT2_RULE, *_DIGITS_THEN_GPT2)
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")


def write_tokenizer(
    metadata: Mapping[str, Any], folder: Path, *, source: Path, max_length: int | None
) -> dict[str, int]:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Returns the ids of the special tokens by role (`bos`, `eos`, `unk`, `pad`), as far as the file names them.

    Raises:
        ModelError: no tokenizer in the file, or a kind whose rules are not known here.
    """
    tokens = _list_of(metadata, "tokenizer.ggml.tokens", source)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, source)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, source)
    else:
        raise ModelError(
            f"{source} has a tokenizer of kind '{kind}'; `gpt2` (byte-level BPE) and `llama` (SentencePiece) are read.",
            cure="Give the model's original folder as `model.path`.",
        )
    _add_marked_tokens(tokenizer, metadata, tokens)
    roles = _special_ids(metadata, len(tokens))
    _add_ends(tokenizer, metadata, tokens, roles, kind)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {f"{role}_token": tokens[index] for role, index in roles.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings["model_max_length"] = max_length if max_length else 10**30
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    return roles


def _list_of(metadata: Mapping[str, Any], key: str, source: Path) -> list[Any]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ModelError(
            f"{source} has no `{key}`, so its tokenizer is not in the file.",
            cure="Give the model's original folder as `model.path`.",
        )
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], source: Path) -> Tokenizer:
    rule = str(metadata.get("tokenizer.ggml.pre", "missing"))
    if rule not in PRE_TOKENIZERS:
        raise ModelError(
            f"{source} splits text by the rule '{rule}', which is not known here. {did_you_mean(rule, PRE_TOKENIZERS)}",
            cure="Give the model's original folder as `model.path`.",
        )
    merges = [_pair(merge) for merge in _list_of(metadata, "tokenizer.ggml.merges", source)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(vocabulary, merges, source, ignore_merges=rule in _WHOLE_WORDS_FIRST))
    if rule in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    """`a b` -> (a, b). The blank searched for is not the first character, which may be a piece of its own."""
    cut = merge.index(" ", 1) if " " in merge[1:] else 0
    return merge[:cut], merge[cut + 1 :]


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], source: Path, **options: Any) -> BPE:
    # The library speaks only of "token out of vocabulary", as a bare Exception; checked here so that it cannot happen.
    for left, right in merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(
                f"{source} merges {left!r} and {right!r}, which are not in its vocabulary.",
                cure="Download the file again.",
            )
    return BPE(vocab=vocabulary, merges=merges, **options)


def _splitter(rule: str) -> pre_tokenizers.PreTokenizer:
    if rule in _SPLITS:
        first: pre_tokenizers.PreTokenizer = pre_tokenizers.Split(Regex(_SPLITS[rule]), behavior="isolated")
        second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([first, second])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _GPT2_RULE:
        return words
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], source: Path) -> Tokenizer:
    scores = _list_of(metadata, "tokenizer.ggml.scores", source)
    if len(scores) != len(tokens):
        raise ModelError(
            f"{source} has {len(tokens):,} tokens and {len(scores):,} scores.", cure="Download the file again."
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type") or []
    unknown = next((tokens[index] for index, kind in enumerate(types) if kind == _UNKNOWN), None)
    merges = _merges_by_score(vocabulary, scores)
    model = _bpe(vocabulary, merges, source, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    blank = normalizers.Replace(" ", _SPACE)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), blank] if prefixed else [blank])
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first: the order in which SentencePiece joins."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_marked_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Tokens that are matched whole: control tokens are special, user-defined ones (`<think>`) are not."""
    types = metadata.get("tokenizer.ggml.token_type") or []
    marked = list(zip(tokens, types, strict=False))
    special = [
        AddedToken(token, normalized=False, special=True) for token, kind in marked if kind in (_CONTROL, _UNKNOWN)
    ]
    plain = [AddedToken(token, normalized=False, special=False) for token, kind in marked if kind == _USER_DEFINED]
    if special:
        tokenizer.add_special_tokens(special)
    if plain:
        tokenizer.add_tokens(plain)


def _special_ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in names.items()}
    return {role: index for role, index in ids.items() if type(index) is int and 0 <= index < count}


def _add_ends(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], roles: Mapping[str, int], kind: str
) -> None:
    """Has BOS and EOS put around a text where the file asks for it."""
    bos_by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "tekken",
    )
    starts = bool(metadata.get("tokenizer.ggml.add_bos_token", bos_by_default)) and "bos" in roles
    ends = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos" in roles
    used = {tokens[roles[role]]: roles[role] for role, on in (("bos", starts), ("eos", ends)) if on}
    before = f"{tokens[roles['bos']]}" if starts else None
    after = f"{tokens[roles['eos']]}" if ends else None

    def around(part: str) -> list[str]:
        index = 0 if part == "$A" else 1
        pieces = [f"{before}:{index}" if before else "", f"{part}:{index}", f"{after}:{index}" if after else ""]
        return [piece for piece in pieces if piece]

    word_ends = processors.ByteLevel(trim_offsets=False)
    if not used:
        if kind == "gpt2":
            tokenizer.post_processor = word_ends
        return
    template = processors.TemplateProcessing(
        single=around("$A"), pair=[*around("$A"), *around("$B")], special_tokens=list(used.items())
    )
    tokenizer.post_processor = processors.Sequence([word_ends, template]) if kind == "gpt2" else template
