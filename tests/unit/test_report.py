"""The truth report: what was read, dropped, cut, and what counts in the loss."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokenize import (
    CHAT,
    CLASSES,
    PLAIN,
    TAGS,
    Source,
    byte_bpe,
    chats,
    minilm,
    texts,
    words_with_specials,
)

from trimtab.data.report import DataReport, build_report
from trimtab.data.reportparts import measure_lengths
from trimtab.data.task import Example, TaskSpec
from trimtab.data.tokenize import TokenDrop, TokenizeOptions, chat_template, tokenize


@dataclass
class Part:
    rows: Any


@dataclass
class Prepared:
    spec: TaskSpec
    train: Part
    eval: Part | None = None
    dropped: tuple[TokenDrop, ...] = ()


def report_of(
    spec: TaskSpec,
    train: Source,
    tokenizer: Any,
    options: TokenizeOptions,
    folder: Path,
    *,
    held_out: Source | None = None,
    dropped: tuple[TokenDrop, ...] = (),
) -> DataReport:
    store = tokenize(train, spec, tokenizer, options, cache_dir=folder)
    evaluation = tokenize(held_out, spec, tokenizer, options, cache_dir=folder) if held_out is not None else None
    rows = range(len(train) + sum(drop.count for drop in dropped))
    prepared = Prepared(spec, Part(rows), Part(range(len(held_out))) if held_out is not None else None, dropped)
    return build_report(prepared, store, evaluation, tokenizer, options)


def test_rows_that_both_splits_share_are_counted_once(tmp_path: Path) -> None:
    tokenizer, options = words_with_specials(), TokenizeOptions(8)
    stores = [tokenize(labelled((text, 0)), CLASSES, tokenizer, options, cache_dir=tmp_path) for text in ("a", "b")]
    rows = range(2)
    report = build_report(Prepared(CLASSES, Part(rows), Part(rows)), stores[0], stores[1], tokenizer, options)
    assert report.rows_read == 2


def labelled(*pairs: tuple[str, int]) -> Source:
    return Source([Example(row, texts=(text,), target=label) for row, (text, label) in enumerate(pairs)])


def test_classification_is_told_with_balance_cuts_and_drops(tmp_path: Path) -> None:
    train = labelled(("a b c d", 0), ("a", 0), ("b", 0), ("c", 1))
    held_out = labelled(("the cat", 0))
    empty = TokenDrop("the text is empty", 2, ("data.csv:4", "data.csv:9"))
    report = report_of(
        CLASSES, train, words_with_specials(), TokenizeOptions(4), tmp_path, held_out=held_out, dropped=(empty,)
    )
    split = report.splits[0]
    assert (split.examples, split.tokens, split.target_tokens) == (4, 13, 4)
    assert [(one.name, one.count, one.share) for one in split.classes] == [("no", 3, 0.75), ("yes", 1, 0.25)]
    assert (split.cut.examples, split.cut.tokens, split.cut.targets) == (1, 2, 0)
    assert (split.lengths.mean, split.lengths.median, split.lengths.longest) == (3.75, 3.0, 6)
    assert split.lengths.bins == ((2, 3, 3), (4, 7, 1))
    assert report.labels_in_one_split == (("yes", "train"),)
    assert (report.rows_read, report.rows_dropped) == (7, 2)
    assert report.refusals == ()
    assert report.first_target == "no"
    shown = "\n".join(report.lines())
    assert "Rows: 7 read, 2 dropped; examples: 4 train, 1 eval" in shown
    assert "2: the text is empty (data.csv:4, data.csv:9)" in shown
    assert "cut at 4: 1 examples (25.0%) lose 2 tokens" in shown
    assert "labels: no 3 (75.0%), yes 1 (25.0%)" in shown
    assert "Labels only in train: yes" in shown
    assert "First example: [CLS] a b [SEP] -> no" in shown


def test_the_answer_is_marked_token_by_token(tmp_path: Path) -> None:
    tokenizer = byte_bpe(bos=True)
    template = chat_template("chatml", tokenizer)
    report = report_of(CHAT, chats(("the cat", "é你 ran")), tokenizer, TokenizeOptions(99, template), tmp_path)
    counted = "".join(text for text, counts in report.first_example if counts)
    assert counted == "é你 ran<|im_end|></s>"
    everything = "".join(text for text, _ in report.first_example)
    assert everything.startswith("<s><|im_start|>user\nthe cat<|im_end|>\n")
    assert "[[é你 ran<|im_end|></s>]]" in report.short_lines()[-1]
    assert report.short_lines()[1] == "  loss on answers, chat template: chatml"


def test_the_first_token_of_a_document_is_nobodys_target(tmp_path: Path) -> None:
    report = report_of(PLAIN, texts("the cat", "a dog"), byte_bpe(), TokenizeOptions(32), tmp_path)
    assert [counts for _, counts in report.first_example] == [False] + [True] * (len(report.first_example) - 1)
    assert report.splits[0].target_tokens == report.splits[0].tokens - 2


def test_examples_that_lose_every_target_are_counted(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    template = chat_template("chatml", tokenizer)
    source = chats(("a", "b"), ("the cat " * 40, "b"), ("a", "b " * 90))
    report = report_of(CHAT, source, tokenizer, TokenizeOptions(60, template), tmp_path)
    cut = report.splits[0].cut
    assert (cut.examples, cut.examples_without_target) == (1, 1)
    assert cut.targets == cut.tokens - 1  # all that was cut of the third, but its last line feed, would have counted
    assert report.dropped[0].locations == ("data.csv:3",)


def test_tags_are_counted_over_words(tmp_path: Path) -> None:
    source = Source([Example(0, words=("cats", "a", "dog"), target=(1, 0, 0))])
    report = report_of(TAGS, source, words_with_specials(), TokenizeOptions(16), tmp_path)
    assert [(one.name, one.count) for one in report.splits[0].classes] == [("O", 2), ("X", 1)]
    assert report.first_example == (
        ("[CLS]", False), (" cat", True), ("s", False), (" a", True), (" dog", True), (" [SEP]", False)
    )  # fmt: skip


def test_values_and_many_labels_are_told(tmp_path: Path) -> None:
    spec = TaskSpec("regression", ("text",), ("score",))
    source = Source([Example(i, texts=("a",), target=float(i)) for i in range(3)])
    report = report_of(spec, source, words_with_specials(), TokenizeOptions(8), tmp_path)
    assert report.splits[0].values is not None
    assert (report.splits[0].values.smallest, report.splits[0].values.mean) == (0.0, 1.0)
    assert "values: 0 to 2, mean 1 +- 0.816" in "\n".join(report.short_lines())

    spec = TaskSpec("multilabel_classification", ("text",), ("x", "y"), ("x", "y"))
    source = Source([Example(i, texts=("a",), target=(1.0, float(i))) for i in range(2)])
    report = report_of(spec, source, words_with_specials(), TokenizeOptions(8), tmp_path)
    assert [(one.count, one.share) for one in report.splits[0].classes] == [(2, 1.0), (1, 0.5)]
    assert report.first_target == "x"


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    train, held_out = labelled(("a", 0), ("b", 0)), labelled(("c", 1))
    report = report_of(CLASSES, train, words_with_specials(), TokenizeOptions(8), tmp_path, held_out=held_out)
    assert report.refusals == (
        "the training data has 1 of the classes (no); there must be two or more",
        "the evaluation data has labels that the training data lacks: yes",
    )
    assert sum(line.startswith("Refused: ") for line in report.short_lines()) == 2


def test_the_same_reason_in_both_splits_is_one_line(tmp_path: Path) -> None:
    source = texts("", "the cat")
    report = report_of(CLASSES, source, byte_bpe(), TokenizeOptions(8), tmp_path, held_out=texts("", "a dog"))
    assert [drop.count for drop in report.dropped] == [2]


def test_json_holds_everything_and_nothing_but_json(tmp_path: Path) -> None:
    report = report_of(CLASSES, labelled(("a", 0), ("b", 1)), words_with_specials(), TokenizeOptions(8), tmp_path)
    facts = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert facts["task"] == "classification"
    assert facts["first_example"][1] == {"text": " a", "counts": False}
    assert facts["splits"][0]["cut"]["max_length"] == 8
    assert set(facts) == {*DataReport.__dataclass_fields__, "rows_dropped"}


def test_text_from_data_cannot_steer_the_terminal(tmp_path: Path) -> None:
    spec = TaskSpec("classification", ("text",), ("label",), ("\x1b[2J", "ok"))
    report = report_of(spec, labelled(("\x1b]0;pwn\x07", 0), ("b", 1)), byte_bpe(), TokenizeOptions(30), tmp_path)
    assert "\x1b" not in "".join(report.lines())


@given(st.lists(st.integers(1, 5000), max_size=50))
def test_every_length_lies_in_one_bin(lengths: list[int]) -> None:
    measured = measure_lengths(np.array(lengths, dtype=np.int32))
    assert sum(count for _, _, count in measured.bins) == len(lengths)
    for low, high, count in measured.bins:
        assert count == sum(low <= length <= high for length in lengths)


@pytest.mark.real
def test_a_real_tokenizer_is_decoded_as_it_reads(tmp_path: Path) -> None:
    source = labelled(("Antidisestablishmentarianism is long.", 0), ("b", 1))
    report = report_of(CLASSES, source, minilm(), TokenizeOptions(64), tmp_path)
    assert "[CLS] antidisestablishmentarianism is long. [SEP] -> no" in "\n".join(report.short_lines())
