from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_stores import RandomTexts

from trimtab.data.batches import FLAT_MULTIPLE, Batch, collate

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


def both(store: RandomTexts, **options: Any) -> tuple[Batch, Batch]:
    indices = range(len(store.lengths))
    padded = collate(store, indices, layout="padded", pad_id=0, **options)
    return padded, collate(store, indices, layout="flat", pad_id=0, **options)


def test_flat_lays_examples_end_to_end_with_positions_that_start_anew() -> None:
    store = RandomTexts("classification", (3, 1, 2))
    batch = collate(store, [2, 0], layout="flat", pad_id=0)
    assert batch.input_ids[0, :5].tolist() == [*store.ids[2], *store.ids[0]]
    assert batch.position_ids[0, :5].tolist() == [0, 1, 0, 1, 2]
    assert (batch.input_ids[0, 5:] == 0).all() and (batch.position_ids[0, 5:] == 0).all()
    assert batch.attention_mask is None
    assert batch.lengths == (2, 3)
    assert (batch.tokens, batch.slots, batch.filler, batch.examples) == (5, FLAT_MULTIPLE, FLAT_MULTIPLE - 5, 2)


def test_padded_fills_the_right_side_and_masks_it() -> None:
    store = RandomTexts("classification", (3, 1))
    batch = collate(store, [0, 1], layout="padded", pad_id=77)
    assert batch.input_ids.tolist() == [list(store.ids[0]), [store.ids[1][0], 77, 77]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert (batch.tokens, batch.slots) == (4, 6)


def test_each_position_of_a_language_model_predicts_the_next_token_of_its_own_example() -> None:
    store = RandomTexts("language_modelling", (3, 2))
    store.targets = [ids.copy() for ids in store.ids]
    padded, flat = both(store)
    assert flat.target_positions is not None and padded.target_positions is not None
    assert flat.target_positions.tolist() == [0, 1, 3]
    assert padded.target_positions.tolist() == [0, 1, 3]
    assert flat.targets.tolist() == [*store.ids[0][1:], *store.ids[1][1:]]


def test_masked_tokens_are_no_targets() -> None:
    store = RandomTexts("instruction", (6,))
    batch = collate(store, [0], layout="flat", pad_id=0)
    assert batch.target_positions is not None
    assert batch.target_positions.tolist() == [1, 2, 3, 4]
    assert batch.targets.tolist() == store.ids[0][2:].tolist()


def test_token_classes_sit_at_their_own_tokens() -> None:
    store = RandomTexts("token_classification", (4,))
    store.targets = [np.array([-100, 2, -100, 0], dtype=np.int32)]
    batch = collate(store, [0], layout="flat", pad_id=0)
    assert batch.target_positions is not None
    assert batch.target_positions.tolist() == [1, 3]
    assert batch.targets.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        ("classification", (2,), torch.int64),
        ("multilabel_classification", (2, 3), torch.float32),
        ("regression", (2,), torch.float32),
    ],
)
def test_whole_text_targets_have_one_row_for_each_example(
    kind: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    batch = collate(RandomTexts(kind, (3, 5)), [0, 1], layout="flat", pad_id=0)
    assert batch.targets.shape == shape
    assert batch.targets.dtype == dtype
    assert batch.target_positions is None


def test_class_weights_become_row_weights() -> None:
    store = RandomTexts("classification", (3, 4, 5))
    store.targets = [2, 0, 2]
    batch = collate(store, [0, 1, 2], layout="flat", pad_id=0, class_weights=[1.0, 2.0, 0.5])
    assert batch.row_weights is not None
    assert batch.row_weights.tolist() == [0.5, 1.0, 0.5]


@given(LENGTHS, st.sampled_from(["language_modelling", "token_classification", "instruction"]))
@settings(max_examples=40, deadline=None)
def test_both_layouts_hold_the_same_targets_at_the_same_tokens(lengths: tuple[int, ...], kind: Any) -> None:
    padded, flat = both(RandomTexts(kind, lengths))
    assert torch.equal(padded.targets, flat.targets)
    assert padded.target_positions is not None and flat.target_positions is not None
    at_targets = [batch.input_ids.flatten()[batch.target_positions] for batch in (padded, flat)]
    assert torch.equal(*at_targets)
    places = [batch.position_ids.flatten()[batch.target_positions] for batch in (padded, flat)]
    assert torch.equal(*places)


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_no_token_is_lost_or_doubled(lengths: tuple[int, ...]) -> None:
    padded, flat = both(RandomTexts("classification", lengths))
    assert padded.attention_mask is not None
    assert torch.equal(padded.input_ids[padded.attention_mask.bool()], flat.input_ids[0, : flat.tokens])
    assert flat.tokens == sum(lengths) and flat.filler == flat.slots - flat.tokens < FLAT_MULTIPLE
    assert flat.slots % FLAT_MULTIPLE == 0 and padded.filler == 0
