"""Rows to examples: the task that is told from the data, labels, what is left out, the split and its laws."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data import formats
from trimtab.data.examples import Dropped, ModelHints, Prepared, prepare
from trimtab.data.formats import Rows, read_rows
from trimtab.data.labels import LabelBook, flag_of, label_name, number_of, sorted_names
from trimtab.data.scan import is_blank
from trimtab.data.split import hold_out, joined_groups
from trimtab.errors import DataError
from trimtab.job import Job

ENCODER = ModelHints(is_decoder=False, can_generate=False, model_type="bert")
DECODER = ModelHints(is_decoder=True, can_generate=True, model_type="llama")
Records = list[dict[str, Any]]


def make_job(train: str = "x", **sections: dict[str, Any]) -> Job:
    data = {"train": train, **sections.pop("data", {})}
    return Job.model_validate({"model": {"path": "m"}, "data": data, **sections})


def rows_of(folder: Path, records: Records, name: str = "a.jsonl") -> Rows:
    path = folder / name
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return read_rows([str(path)], cache_dir=folder / "cache")


def csv_rows(folder: Path, text: str) -> Rows:
    path = folder / "a.csv"
    path.write_text(text, encoding="utf-8")
    return read_rows([str(path)], cache_dir=folder / "cache")


def prepared(
    folder: Path,
    records: Records,
    evaluation: Records | None = None,
    model: ModelHints = ENCODER,
    **sections: dict[str, Any],
) -> Prepared:
    held = None if evaluation is None else rows_of(folder, evaluation, "e.jsonl")
    return prepare(make_job(**sections), rows_of(folder, records), held, model)


def labelled(count: int, labels: str = "ab") -> Records:
    return [{"text": f"text {i}", "label": labels[i % len(labels)]} for i in range(count)]


INFERRED: list[tuple[str, Records, ModelHints, str, tuple[str, ...], tuple[str, ...]]] = [
    ("text and label", labelled(9), ENCODER, "classification", ("text",), ("label",)),
    ("other names", [{"Review_Text": f"t{i}", "Sentiment": i % 2} for i in range(9)], ENCODER, "classification",
     ("Review_Text",), ("Sentiment",)),
    ("a decoder with labels", labelled(9), DECODER, "classification", ("text",), ("label",)),
    ("a pair", [{"premise": f"p{i}", "hypothesis": "h", "label": i % 3} for i in range(9)], ENCODER, "classification",
     ("premise", "hypothesis"), ("label",)),
    ("question and answer with a label", [{"question": f"p{i}", "answer": "h", "label": i % 2} for i in range(9)],
     DECODER, "classification", ("question", "answer"), ("label",)),
    ("two columns", [{"tweet": f"t{i}", "mood": "xy"[i % 2]} for i in range(9)], ENCODER, "classification",
     ("tweet",), ("mood",)),
    ("true and false", [{"text": f"t{i}", "label": i % 2 == 0} for i in range(9)], ENCODER, "classification",
     ("text",), ("label",)),
    ("fractions", [{"text": f"t{i}", "score": i / 2} for i in range(9)], ENCODER, "regression", ("text",), ("score",)),
    ("many whole numbers", [{"text": f"t{i}", "score": i * 3} for i in range(40)], ENCODER, "regression",
     ("text",), ("score",)),
    ("class ids", [{"text": f"t{i}", "label": i % 77} for i in range(300)], ENCODER, "classification",
     ("text",), ("label",)),
    ("lists of labels", [{"text": f"t{i}", "labels": ["x", "y"][: i % 3]} for i in range(9)], ENCODER,
     "multilabel_classification", ("text",), ("labels",)),
    ("columns of 0 and 1", [{"text": f"t{i}", "toxic": i % 2, "rude": int(i % 3 == 0)} for i in range(9)], ENCODER,
     "multilabel_classification", ("text",), ("toxic", "rude")),
    ("words and tags", [{"tokens": ["a", f"b{i}"], "ner_tags": ["O", f"T{i % 2}"]} for i in range(9)], ENCODER,
     "token_classification", ("tokens",), ("ner_tags",)),
    ("only text", [{"text": f"t{i}"} for i in range(9)], DECODER, "language_modelling", ("text",), ()),
    ("alpaca", [{"instruction": f"t{i}", "input": "", "output": "x"} for i in range(9)], DECODER, "instruction",
     ("instruction", "input", "output"), ()),
    ("prompt and completion", [{"prompt": f"t{i}", "completion": "x"} for i in range(9)], DECODER, "instruction",
     ("prompt", "completion"), ()),
    ("question and answer", [{"question": f"t{i}", "answer": "x"} for i in range(9)], DECODER, "instruction",
     ("question", "answer"), ()),
    ("messages", [{"messages": [{"role": "user", "content": f"t{i}"}, {"role": "assistant", "content": "x"}]}
                  for i in range(9)], DECODER, "instruction", ("messages",), ()),
    ("sharegpt", [{"conversations": [{"from": "human", "value": f"t{i}"}, {"from": "gpt", "value": "x"}]}
                  for i in range(9)], DECODER, "instruction", ("conversations",), ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "records", "model", "kind", "texts", "labels"), INFERRED, ids=lambda value: str(value)[:20]
)
def test_the_task_is_told_and_said(
    tmp_path: Path,
    what: str,
    records: Records,
    model: ModelHints,
    kind: str,
    texts: tuple[str, ...],
    labels: tuple[str, ...],
) -> None:
    spec = prepared(tmp_path, records, model=model).spec
    assert (spec.kind, spec.text_columns, spec.label_columns) == (kind, texts, labels)
    assert spec.reasons and all(name in spec.reasons[0] for name in labels)


def test_the_job_decides_against_what_would_be_told(tmp_path: Path) -> None:
    records = [{"text": f"t{i}", "label": i % 2, "other": f"o{i}"} for i in range(9)]
    assert prepared(tmp_path, records, task={"kind": "regression"}).spec.kind == "regression"
    pair = prepared(tmp_path, records, data={"text": ["text", "other"], "label": "label"})
    assert pair.spec.text_columns == ("text", "other")
    assert pair.train[0].texts == ("t0", "o0")
    told = prepared(tmp_path, records, model=DECODER, task={"kind": "instruction"}, data={"text": ["text", "other"]})
    assert [m["content"] for m in told.train[0].messages] == ["t0", "o0"]
    plain = prepared(tmp_path, records, model=DECODER, task={"kind": "language_modelling"}, data={"text": "other"})
    assert plain.train[0].texts == ("o0",)


def test_a_conversation_under_another_name_is_read_when_named(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    made = prepared(
        tmp_path,
        [{"talk": turns}],
        model=DECODER,
        task={"kind": "instruction"},
        data={"text": "talk", "eval_fraction": 0},
    )
    assert made.train[0].messages == ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})


def test_each_task_makes_its_examples(tmp_path: Path) -> None:
    whole = {"eval_fraction": 0}
    classes = prepared(tmp_path, labelled(4), data=whole)
    assert [e.target for e in (classes.train[i] for i in range(4))] == [0, 1, 0, 1]
    lists = [{"text": f"t{i}", "labels": [["y"], ["x", "y"], [], ["x"]][i]} for i in range(4)]
    many = prepared(tmp_path, lists, data=whole)
    assert many.spec.label_names == ("x", "y")
    assert many.train.labels().tolist() == [[0, 1], [1, 1], [0, 0], [1, 0]]
    flags = prepared(tmp_path, [{"text": f"t{i}", "b": i % 2, "a": 1} for i in range(4)], data=whole)
    assert flags.spec.label_names == ("b", "a")
    assert flags.train[1].target == (1.0, 1.0)
    tags = prepared(
        tmp_path, [{"tokens": ["a", "b"], "tags": ["O", "B"]}, {"tokens": ["c"], "tags": ["B"]}], data=whole
    )
    assert (tags.train[0].words, tags.train[0].target) == (("a", "b"), (1, 0))
    values = prepared(tmp_path, [{"text": f"t{i}", "score": i / 2} for i in range(4)], data=whole)
    assert values.train.labels().tolist() == [0.0, 0.5, 1.0, 1.5]
    with pytest.raises(ValueError, match="no label per example"):
        tags.train.labels()


def test_numbers_are_named_in_their_order_and_text_by_code_point(tmp_path: Path) -> None:
    numbers = [{"text": f"t{i}", "label": [10, 9, 2.0, None][i % 4]} for i in range(40)]
    assert prepared(tmp_path, numbers).spec.label_names == ("2", "9", "10")
    assert sorted_names(["b", "B", "a", "10", "9"]) == ("10", "9", "B", "a", "b")


def test_a_models_own_label_order_is_kept_when_it_knows_all_labels(tmp_path: Path) -> None:
    model = replace(ENCODER, label_names=("b", "c", "a"))
    made = prepared(tmp_path, labelled(9), model=model)
    assert made.spec.label_names == ("b", "c", "a")
    assert made.train.labels()[:2].tolist() == [2, 0]
    assert any("No training example has the label 'c'" in warning for warning in made.warnings)
    assert prepared(tmp_path, labelled(9, "ax"), model=model).spec.label_names == ("a", "x")


def test_class_names_that_a_file_carries_are_used(tmp_path: Path) -> None:
    features = {"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}
    table = pa.table({"text": [f"t{i}" for i in range(9)], "label": [1, 0, -1] * 3})
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / "a.parquet")
    rows = read_rows([str(tmp_path / "a.parquet")], cache_dir=tmp_path / "c")
    made = prepare(make_job(data={"eval_fraction": 0}), rows, None, ENCODER)
    assert made.spec.label_names == ("neg", "pos")
    assert made.train.labels().tolist() == [1, 0] * 3
    assert [(drop.reason, drop.count) for drop in made.dropped] == [("no label", 3)]
    csv = csv_rows(tmp_path, "text,label\nx,pos\ny,neg\n")
    assert prepare(make_job(), rows, csv, ENCODER).eval is not None


def test_rows_without_text_or_label_and_repeats_are_left_out_and_counted(tmp_path: Path) -> None:
    extra: Records = [
        {"text": " \u200b\u00a0", "label": "a"},
        {"text": None, "label": "a"},
        {"text": "x", "label": None},
        {"text": "text 0", "label": "a"},
        {"text": "text 0", "label": "a"},
    ]
    made = prepared(tmp_path, labelled(20) + extra, [*labelled(2), labelled(1)[0], {"text": "", "label": "a"}])
    places = [f"{tmp_path / 'a.jsonl'}:{line}" for line in (21, 22, 23, 24, 25)]
    assert made.dropped == (
        Dropped("empty text", "train", 2, tuple(places[:2])),
        Dropped("no label", "train", 1, tuple(places[2:3])),
        Dropped("duplicate", "train", 2, tuple(places[3:])),
        Dropped("empty text", "eval", 1, (f"{tmp_path / 'e.jsonl'}:4",)),
    )
    assert len(made.train) == 20
    assert made.eval is not None and len(made.eval) == 3, "repeats are left out of training alone"


def test_warnings_name_what_is_doubtful(tmp_path: Path) -> None:
    extra: Records = [
        {"text": "text 0", "label": "b"},
        {"text": "new", "label": " a"},
        {"text": "newer", "label": "rare"},
    ]
    told = " ".join(prepared(tmp_path, labelled(20) + extra, labelled(3)).warnings)
    assert "1 text occurs with different labels, first at" in told and "a.jsonl:1 and" in told and "a.jsonl:21" in told
    assert "1 label has blanks around it" in told
    assert "No evaluation example has the label 'rare'" in told
    assert "3 of 3 evaluation texts are also in training" in told and "e.jsonl:1" in told
    mixed = prepared(tmp_path, [{"text": f"t{i}", "label": ["0", 0, 1][i % 3]} for i in range(9)])
    assert mixed.spec.label_names == ("0", "1")
    assert any("1 and '1' are taken as one label" in warning for warning in mixed.warnings)
    assert any("more than the 2" in warning for warning in prepared(tmp_path, labelled(2), labelled(5)).warnings)
    lone = prepared(tmp_path, [{"text": "only"}], model=DECODER)
    assert lone.eval is None and any("nothing is held out" in warning for warning in lone.warnings)


def test_good_data_gives_no_warning(tmp_path: Path) -> None:
    made = prepared(tmp_path, labelled(40))
    assert made.warnings == () and made.dropped == ()


def test_batches_items_and_labels_agree(tmp_path: Path) -> None:
    made = prepared(tmp_path, labelled(57), data={"eval_fraction": 0.3})
    for part in (made.train, made.eval):
        assert part is not None
        listed = [example for batch in part.batches(10) for example in batch]
        assert listed == [part[i] for i in range(len(part))]
        assert [example.row for example in listed] == part.indices.tolist()
        assert part.labels().tolist() == [example.target for example in listed]
        assert part[-1] == listed[-1]
        with pytest.raises(IndexError):
            part[len(part)]


def test_examples_over_many_blocks_are_the_rows_they_say(tmp_path: Path) -> None:
    count = 2 * formats.BLOCK_ROWS + 5
    rows = csv_rows(tmp_path, "text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(count)))
    made = prepare(make_job(data={"eval_fraction": 0.01}), rows, None, ENCODER)
    assert made.eval is not None and len(made.eval) == round(count * 0.01)
    for part in (made.train, made.eval):
        assert all(e.texts == (f"text {e.row}",) for batch in part.batches(1000) for e in batch)


def test_the_digest_follows_content_task_and_rows(tmp_path: Path) -> None:
    digests = [
        part.digest
        for made in (
            prepared(tmp_path, labelled(20)),
            prepared(tmp_path, labelled(20), training={"seed": 1}),
            prepared(tmp_path, labelled(21)),
            prepared(tmp_path, labelled(20, "ac")),
        )
        for part in (made.train, made.eval)
        if part is not None
    ]
    assert len(set(digests)) == len(digests) == 8
    assert prepared(tmp_path, labelled(20)).train.digest == digests[0]


def test_a_split_made_here_never_parts_equal_texts(tmp_path: Path) -> None:
    records = [{"text": f"t{i // 2}", "label": "ab"[i % 2]} for i in range(60)]
    made = prepared(tmp_path, records, data={"eval_fraction": 0.3})
    assert made.eval is not None
    sides = [{e.texts for batch in part.batches(9) for e in batch} for part in (made.train, made.eval)]
    assert not sides[0] & sides[1]
    assert len(made.eval) == 18


def test_two_rows_of_two_classes_are_both_trained_on_unless_a_share_is_asked_for(tmp_path: Path) -> None:
    made = prepared(tmp_path, labelled(2))
    assert made.eval is None and "Nothing is held out for evaluation" in made.warnings[-1]
    with pytest.raises(DataError, match="no evaluation data can be split off"):
        prepared(tmp_path, labelled(2), data={"eval_fraction": 0.1})


def test_rows_of_one_group_stay_on_one_side(tmp_path: Path) -> None:
    records = [
        {"text": f"t{i}", "label": "ab"[i % 2], "who": [None, "x", "y", "z"][i % 4] or f"p{i}"} for i in range(80)
    ]
    made = prepared(tmp_path, records, data={"eval_fraction": 0.3, "group_by": "who"})
    assert made.eval is not None
    sides = [{records[i]["who"] for i in part.indices} for part in (made.train, made.eval)]
    assert not sides[0] & sides[1]


def test_the_same_seed_gives_the_same_split_and_another_another(tmp_path: Path) -> None:
    def held(seed: int) -> list[int]:
        made = prepared(tmp_path, labelled(50), training={"seed": seed})
        assert made.eval is not None
        return made.eval.indices.tolist()

    assert held(3) == held(3) != held(4)


def test_the_split_is_what_it_was_in_the_first_release() -> None:
    """Golden, from this code: a resumed run must find the same split in every later version."""
    assert hold_out(10, 0.3, 0)[1].tolist() == [1, 2, 3]
    assert hold_out(10, 0.3, 0, classes=[(i % 2,) for i in range(10)])[1].tolist() == [2, 3, 8]


CASES = st.integers(2, 60).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.floats(0.01, 0.9),
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(0, 4), min_size=count, max_size=count),
        st.lists(st.integers(0, 20), min_size=count, max_size=count),
    )
)


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_without_groups_the_share_is_exact_and_stratified(case: tuple[int, float, int, list[int], list[int]]) -> None:
    count, fraction, seed, classes, _ = case
    train, held = hold_out(count, fraction, seed)
    assert sorted([*train, *held]) == list(range(count))
    assert (
        len(held) == min(max(round(count * fraction), 1), count - 1) or abs(len(held) - count * fraction) <= 0.5 + 1e-9
    )
    sizes = Counter(classes)
    if all(size == 1 for size in sizes.values()):
        return
    train, held = hold_out(count, fraction, seed, classes=[(one,) for one in classes])
    assert {classes[i] for i in train} == set(classes), "every class stays in train"
    wanted = min(max(round(count * fraction), 1), count - 1)
    assert len(held) == min(wanted, count - len(sizes))
    if wanted <= count - len(sizes) and all(size * (1 - fraction) >= 1 for size in sizes.values()):
        share = wanted / count
        assert all(abs(sum(classes[i] == one for i in held) - size * share) < 1 + 1e-9 for one, size in sizes.items())


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_groups_are_never_parted_and_their_numbers_do_not_matter(
    case: tuple[int, float, int, list[int], list[int]],
) -> None:
    count, fraction, seed, _, groups = case
    if len(set(groups)) < 2:
        return
    train, held = hold_out(count, fraction, seed, groups=np.array(groups))
    assert len(train) and len(held)
    assert not {groups[i] for i in train} & {groups[i] for i in held}
    renamed = hold_out(count, fraction, seed, groups=np.array([100 - group for group in groups]))
    assert renamed[1].tolist() == held.tolist()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30))
def test_joined_groups_are_the_connected_parts(pairs: list[tuple[int, int]]) -> None:
    groups = joined_groups(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))
    for i, (a, b) in enumerate(pairs):
        for j, (c, d) in enumerate(pairs):
            if a == c or b == d:
                assert groups[i] == groups[j]
    parts = {int(group): {(pairs[i]) for i in np.flatnonzero(groups == group)} for group in groups}
    for one in parts.values():
        for other in parts.values():
            if one is not other:
                assert not {a for a, _ in one} & {a for a, _ in other} and not {b for _, b in one} & {
                    b for _, b in other
                }


@pytest.mark.parametrize(
    ("value", "name"),
    [(None, None), ("", None), ("  ", None), (float("nan"), None), ("NaN", None), ("null", None), (3, "3"), (3.0, "3"),
     ("3", "3"), (0.5, "0.5"), (True, "true"), (" pos ", "pos"), ("none", "none"), (0, "0")],
)  # fmt: skip
def test_label_names(value: Any, name: str | None) -> None:
    assert label_name(value) == name
    assert LabelBook().code(value) == (None if name is None else 0)


def test_ids_get_their_names_and_unknown_ones_are_refused() -> None:
    assert label_name(1, ("no", "yes")) == "yes" and label_name(-1, ("no", "yes")) is None
    with pytest.raises(ValueError, match="class 2, but the file names only 2 classes"):
        label_name(2, ("no", "yes"))


def test_numbers_and_flags_are_read_from_text_too() -> None:
    assert number_of(" 1.5 ") == 1.5 and number_of("") is None and number_of(2) == 2.0
    assert [flag_of(value) for value in (1, "0", 1.0, True, "False", None)] == [True, False, True, True, False, None]


@pytest.mark.parametrize("text", ["", " \t\n", "\u200b", "\ufeff\u00ad", "\u3000", "\u200d\u2060"])
def test_text_that_cannot_be_seen_is_blank(text: str) -> None:
    assert is_blank(text) and not is_blank(text + "。")


def test_faults_of_both_splits_come_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, [*labelled(9), {"text": 1, "label": "a"}], [{"text": [], "label": "a"}])
    assert [problem.rsplit("/", 1)[1][:10] for problem in caught.value.problems] == ["a.jsonl:10", "e.jsonl:1:"]
