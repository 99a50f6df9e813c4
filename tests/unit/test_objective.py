from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed import DECODERS, ENCODERS, LENGTHS, VOCABULARY, make_model
from text_stores import RandomTexts
from torch import nn
from torch.nn import functional

from trimtab.data.batches import Batch, collate
from trimtab.data.task import IGNORED, TaskSpec
from trimtab.errors import ModelError
from trimtab.job import TaskKind
from trimtab.models.objective import TextObjective, build_objective

KINDS: tuple[TaskKind, ...] = (
    "classification",
    "multilabel_classification",
    "regression",
    "token_classification",
    "language_modelling",
    "instruction",
)
LAYOUTS = ("flat", "padded")


def objective_for(kind: TaskKind, layout: Any = "flat", **options: Any) -> tuple[TextObjective, RandomTexts]:
    config = DECODERS["llama"] if kind in ("language_modelling", "instruction") else ENCODERS["bert"]
    store = RandomTexts(kind, LENGTHS, vocabulary=VOCABULARY)
    return build_objective(make_model(config, kind), store.spec, layout=layout, pad_id=0, **options), store


def whole(objective: TextObjective, store: RandomTexts, **options: Any) -> Batch:
    return collate(store, range(len(store.lengths)), layout=objective.layout, pad_id=0, **options)


def transformers_mean_loss(model: nn.Module, store: RandomTexts) -> float:
    """transformers' own loss of the padded examples: a mean over targets."""
    batch = collate(store, range(len(store.lengths)), layout="padded", pad_id=0)
    labels = batch.targets
    if batch.target_positions is not None:
        labels = torch.full_like(batch.input_ids, IGNORED).flatten()
        shift = 0 if store.spec.kind == "token_classification" else 1
        labels[batch.target_positions + shift] = batch.targets
        labels = labels.view_as(batch.input_ids)
    model.config.problem_type = {  # type: ignore[union-attr]
        "classification": "single_label_classification",
        "multilabel_classification": "multi_label_classification",
        "regression": "regression",
    }.get(store.spec.kind)
    with torch.no_grad():
        return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_transformers_own_times_the_targets(kind: TaskKind, layout: str) -> None:
    objective, store = objective_for(kind, layout)
    batch = whole(objective, store)
    ours = objective.loss_sum(batch)
    assert ours.dtype == torch.float32 and ours.shape == ()
    objective.release()
    expected = transformers_mean_loss(objective.module, store) * batch.target_tokens
    assert ours.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@given(cut=st.lists(st.integers(1, len(LENGTHS) - 1), max_size=3, unique=True))
@settings(max_examples=4, deadline=None)
def test_the_cut_into_micro_batches_changes_nothing(kind: TaskKind, layout: str, cut: list[int]) -> None:
    objective, store = objective_for(kind, layout)
    expected = objective.loss_sum(whole(objective, store)).item()
    bounds = [0, *sorted(cut), len(LENGTHS)]
    parts = [
        collate(store, range(first, last), layout=objective.layout, pad_id=0)
        for first, last in itertools.pairwise(bounds)
    ]
    assert sum(objective.loss_sum(part).item() for part in parts) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_gives_the_loss_and_what_metrics_need(kind: TaskKind) -> None:
    objective, store = objective_for(kind)
    batch = whole(objective, store)
    loss, outputs = objective.evaluate(batch)
    shapes = {
        "classification": (6, 3),
        "multilabel_classification": (6, 3),
        "regression": (6,),
        "token_classification": (batch.target_tokens, 3),
    }
    assert outputs.shape == shapes.get(kind, (0,))
    assert not loss.requires_grad and not outputs.requires_grad
    assert outputs.dtype == torch.float32
    with torch.inference_mode():
        again, _ = objective.evaluate(batch)
    assert loss.item() == again.item() == pytest.approx(objective.loss_sum(batch).item(), rel=1e-6)


def test_class_weights_weigh_each_example_by_its_own_class() -> None:
    objective, store = objective_for("classification", label_smoothing=0.1)
    weights = [0.5, 2.0, 1.0]
    batch = whole(objective, store, class_weights=weights)
    _, logits = objective.evaluate(batch)
    losses = functional.cross_entropy(logits, batch.targets, reduction="none", label_smoothing=0.1)
    expected = (losses * torch.tensor(weights)[batch.targets]).sum().item()
    assert objective.loss_sum(batch).item() == pytest.approx(expected, rel=1e-6)


def test_labels_of_an_example_are_averaged_and_weighted_by_class() -> None:
    weights = [0.5, 2.0, 1.0]
    objective, store = objective_for("multilabel_classification", class_weights=weights, label_smoothing=0.2)
    batch = whole(objective, store)
    _, logits = objective.evaluate(batch)
    smoothed = batch.targets * 0.8 + 0.1
    losses = functional.binary_cross_entropy_with_logits(logits, smoothed, reduction="none") * torch.tensor(weights)
    assert objective.loss_sum(batch).item() == pytest.approx(losses.mean(1).sum().item(), rel=1e-6)


def test_label_smoothing_of_a_language_model_is_torchs() -> None:
    objective, store = objective_for("language_modelling", label_smoothing=0.1)
    batch = whole(objective, store)
    ours = objective.loss_sum(batch).item()
    objective.release()
    padded = collate(store, range(len(LENGTHS)), layout="padded", pad_id=0)
    with torch.no_grad():
        logits = objective.module(input_ids=padded.input_ids, attention_mask=padded.attention_mask).logits
    picked = logits.flatten(0, 1)[padded.target_positions]
    expected = functional.cross_entropy(picked, padded.targets, reduction="sum", label_smoothing=0.1)
    assert ours == pytest.approx(expected.item(), rel=1e-5)


def test_a_text_that_ends_in_the_padding_token_is_read_to_its_end() -> None:
    store = RandomTexts("classification", (5, 3), vocabulary=VOCABULARY)
    store.ids[1][-1] = 0
    losses: list[float] = []
    for layout in LAYOUTS:
        objective = build_objective(
            make_model(DECODERS["llama"], "classification"), store.spec, layout=layout, pad_id=0
        )
        losses.append(objective.loss_sum(whole(objective, store)).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_weights_give_float32_losses_near_the_exact_ones(kind: TaskKind) -> None:
    objective, store = objective_for(kind)
    batch = whole(objective, store)
    exact = objective.loss_sum(batch).item()
    objective.module.to(torch.bfloat16)
    loss = objective.loss_sum(batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=3e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast_gives_float32_losses_and_gradients(kind: TaskKind, layout: str) -> None:
    objective, store = objective_for(kind, layout)
    batch = whole(objective, store)
    exact = objective.loss_sum(batch).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective.loss_sum(batch)
        loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=3e-2)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in objective.module.parameters())


def test_training_is_a_function_of_torchs_seed() -> None:
    objective, store = objective_for("classification")
    objective.module.train()
    batch = whole(objective, store)
    losses: list[float] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(objective.loss_sum(batch).item())
    assert losses[0] == losses[1] != losses[2]


def test_a_module_without_a_backbone_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear is not a transformers model.*trimtab\.Trainer"):
        build_objective(nn.Linear(2, 2), TaskSpec("classification", ("text",)), layout="flat", pad_id=0)
