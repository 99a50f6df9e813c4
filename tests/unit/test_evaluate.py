from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from test_objective import KINDS, LAYOUTS, LENGTHS, objective_for
from text_stores import RandomTexts
from torch import Tensor, nn

from trimtab.data.batches import Batch, collate
from trimtab.data.sources import OwnBatch
from trimtab.data.task import IGNORED, TaskSpec
from trimtab.errors import JobError
from trimtab.job import TaskKind
from trimtab.models.objective import TextObjective
from trimtab.models.own import OwnObjective
from trimtab.train.evaluate import evaluate, evaluate_own, evaluation_mode, targets_per_example

NAMES = ("O", "B-x", "I-x")
EACH = [[index] for index in range(len(LENGTHS))]
UNEVEN = [[3, 0], [5], [1, 2, 4]]


def spec_of(store: RandomTexts) -> TaskSpec:
    return replace(store.spec, label_names=NAMES)


def batches(objective: TextObjective, store: RandomTexts, parts: list[list[int]], **options: Any) -> Iterator[Batch]:
    return (collate(store, part, layout=objective.layout, pad_id=0, **options) for part in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_and_cut_change_no_metric(kind: TaskKind) -> None:
    found = []
    for layout in LAYOUTS:
        objective, store = objective_for(kind, layout)
        for parts in (EACH, UNEVEN, [list(range(len(LENGTHS)))]):
            found.append(evaluate(objective, batches(objective, store, parts), spec_of(store)))
    for values in found[1:]:
        assert values == pytest.approx(found[0], rel=1e-4, nan_ok=True)
    assert math.isfinite(found[0]["loss"])


def test_the_loss_is_the_mean_over_all_targets_not_over_batches() -> None:
    objective, store = objective_for("language_modelling")
    parts = list(batches(objective, store, UNEVEN))
    total = sum(objective.evaluate(batch)[0].item() for batch in parts)
    targets = sum(batch.target_tokens for batch in parts)
    values = evaluate(objective, parts, spec_of(store))
    assert values == pytest.approx({"loss": total / targets, "perplexity": math.exp(total / targets)})


@pytest.mark.parametrize("kind", ["classification", "token_classification"])
def test_class_weights_are_in_the_loss_and_its_denominator(kind: TaskKind) -> None:
    objective, store = objective_for(kind)
    plain = evaluate(objective, batches(objective, store, UNEVEN), spec_of(store))
    same = evaluate(objective, batches(objective, store, UNEVEN, class_weights=[3.0] * 3), spec_of(store))
    unlike = evaluate(objective, batches(objective, store, UNEVEN, class_weights=[9.0, 1.0, 0.1]), spec_of(store))
    assert same == pytest.approx(plain, nan_ok=True)
    assert unlike.pop("loss") != pytest.approx(plain.pop("loss"))
    assert unlike == pytest.approx(plain, nan_ok=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_each_target_belongs_to_its_example(layout: Any, lengths: list[int], seed: int) -> None:
    store = RandomTexts("token_classification", tuple(lengths), seed=seed)
    batch = collate(store, range(len(lengths)), layout=layout, pad_id=0)
    expected = [int((store.labels(index) != IGNORED).sum()) for index in range(len(lengths))]
    assert targets_per_example(batch) == expected


def test_spans_stop_at_the_end_of_an_example() -> None:
    objective, store = objective_for("token_classification")
    spec = replace(store.spec, label_names=("O", "city", "street"))
    one = evaluate(objective, batches(objective, store, [list(range(len(LENGTHS)))]), spec)
    assert one == pytest.approx(evaluate(objective, batches(objective, store, EACH), spec), rel=1e-4, nan_ok=True)


def test_accuracy_is_that_of_the_models_own_answers() -> None:
    objective, store = objective_for("classification")
    answers = torch.cat([objective.evaluate(batch)[1] for batch in batches(objective, store, EACH)]).argmax(1)
    values = evaluate(objective, batches(objective, store, UNEVEN), spec_of(store))
    assert values["accuracy"] == sk.accuracy_score(store.targets, answers)


class Modes(nn.Module):
    """Some parts training, some not."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9), nn.Sequential(nn.Linear(2, 1)))
        self.train()
        self.parts[2].eval()
        self.parts[0].eval()

    def modes(self) -> list[bool]:
        return [part.training for part in self.modules()]

    def forward(self, values: Tensor) -> Tensor:
        assert not any(self.modes()) and not torch.is_grad_enabled()
        return self.parts(values).squeeze(-1)


def losses(module: nn.Module, data: Any) -> Tensor:
    return (module(data[0]) - data[1]) ** 2


def measures(module: nn.Module, data: Any) -> Mapping[str, Tensor]:
    off = (module(data[0]) - data[1]).abs()
    return {"off": off, "close": off < 1}


def own_batches(sizes: tuple[int, ...]) -> list[OwnBatch]:
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(sum(sizes), 2, generator=random), torch.randn(sum(sizes), generator=random)
    cut = zip(inputs.split(list(sizes)), targets.split(list(sizes)), strict=True)
    return [OwnBatch(pair, len(pair[1])) for pair in cut]


def test_the_mode_of_every_module_comes_back_and_gradients_too() -> None:
    module = Modes()
    before = module.modes()
    evaluate_own(OwnObjective(module, losses), own_batches((3, 1)))
    assert module.modes() == before and torch.is_grad_enabled()


def test_the_mode_comes_back_after_an_error() -> None:
    module = Modes()
    before = module.modes()
    with pytest.raises(ZeroDivisionError), evaluation_mode(module):
        _ = 1 / 0
    assert module.modes() == before and torch.is_grad_enabled()


def test_own_measures_are_means_over_all_examples() -> None:
    objective = OwnObjective(Modes(), losses, measures)
    values = evaluate_own(objective, own_batches((5, 1, 3)))
    assert tuple(values) == ("loss", "off", "close")
    assert values == pytest.approx(evaluate_own(objective, own_batches((9,))), rel=1e-6)
    module = objective.module.eval()
    (batch,) = own_batches((9,))
    with torch.no_grad():
        off = (module.parts(batch.data[0]).squeeze(-1) - batch.data[1]).abs()
    assert values["close"] == (off < 1).double().mean().item()
    assert values["loss"] == pytest.approx(off.square().mean().item(), rel=1e-6)


def test_own_loss_alone_and_an_empty_set() -> None:
    objective = OwnObjective(Modes(), losses)
    assert tuple(evaluate_own(objective, own_batches((2, 2)))) == ("loss",)
    assert math.isnan(evaluate_own(objective, [])["loss"])


def test_measures_whose_names_change_are_refused() -> None:
    def fickle(module: nn.Module, data: Any) -> Mapping[str, Tensor]:
        return {f"of_{len(data[1])}": data[1]}

    with pytest.raises(JobError, match="returned of_1 for one batch and of_3 for another"):
        evaluate_own(OwnObjective(Modes(), losses, fickle), own_batches((3, 1)))


def test_a_measure_called_loss_is_refused() -> None:
    objective = OwnObjective(Modes(), losses, lambda module, data: {"loss": data[1]})
    with pytest.raises(JobError, match=r"'loss'.*Give it another name"):
        evaluate_own(objective, own_batches((3,)))


def test_evaluation_draws_no_random_numbers_and_changes_no_weight() -> None:
    objective, store = objective_for("classification")
    objective.module.train()
    weights = {name: value.clone() for name, value in objective.module.state_dict().items()}
    state = torch.random.get_rng_state()
    first = evaluate(objective, batches(objective, store, EACH), spec_of(store))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert evaluate(objective, batches(objective, store, EACH), spec_of(store)) == first
    assert all(torch.equal(weights[name], value) for name, value in objective.module.state_dict().items())
