from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk
from torch import Tensor

from trimtab.data.task import TaskSpec
from trimtab.errors import JobError
from trimtab.job import TaskKind
from trimtab.train import metrics as module
from trimtab.train.metrics import TaskMetrics, metrics_for
from trimtab.train.spans import read_tags, spans

ROWS = 61
NAMES = ("a", "b", "c", "d")


def spec_of(kind: TaskKind, names: tuple[str, ...] = NAMES) -> TaskSpec:
    return TaskSpec(kind, ("text",), label_names=names)


def measured(spec: TaskSpec, outputs: Tensor, targets: Tensor, cuts: tuple[int, ...] = ()) -> dict[str, float]:
    metrics = metrics_for(spec)
    bounds = [0, *sorted(cuts), len(targets)]
    for start, end in itertools.pairwise(bounds):
        if end > start:
            metrics.update(outputs[start:end], targets[start:end], 2.0 * (end - start), end - start)
    return metrics.compute()


def class_rows(classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores in tenths, so that there are ties, and better than chance."""
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (ROWS,), generator=random)
    outputs = torch.randn(ROWS, classes, generator=random) + torch.nn.functional.one_hot(targets, classes)
    return (outputs * 10).round() / 10, targets


def rows_for(kind: TaskKind, seed: int = 0) -> tuple[TaskSpec, Tensor, Tensor]:
    outputs, targets = class_rows(len(NAMES), seed)
    if kind == "multilabel_classification":
        return spec_of(kind), outputs, (outputs.roll(1, 0) + outputs > 0.5).float()
    if kind == "regression":
        return spec_of(kind, ()), outputs[:, 0], (outputs[:, 0] + outputs[:, 1]).round()
    return spec_of(kind), outputs, targets


@pytest.mark.parametrize("classes", [2, 4])
def test_classification_agrees_with_scikit_learn(classes: int) -> None:
    outputs, targets = class_rows(classes)
    predicted, scores = outputs.argmax(1), outputs.double().softmax(1)
    values = measured(spec_of("classification", NAMES[:classes]), outputs, targets)
    expected = {
        "loss": 2.0,
        "accuracy": sk.accuracy_score(targets, predicted),
        "f1": sk.f1_score(targets, predicted, average="macro"),
        "mcc": sk.matthews_corrcoef(targets, predicted),
        "auroc": sk.roc_auc_score(targets, scores[:, 1] if classes == 2 else scores, multi_class="ovr"),
    }
    if classes == 2:
        expected["f1_positive"] = sk.f1_score(targets, predicted)
    assert values == pytest.approx(expected, rel=1e-12)


def test_multilabel_agrees_with_scikit_learn() -> None:
    spec, outputs, targets = rows_for("multilabel_classification")
    predicted = (outputs > 0).int()
    assert measured(spec, outputs, targets) == pytest.approx(
        {
            "loss": 2.0,
            "f1_micro": sk.f1_score(targets, predicted, average="micro"),
            "f1_macro": sk.f1_score(targets, predicted, average="macro"),
            "exact_match": sk.accuracy_score(targets, predicted),
            "auroc": sk.roc_auc_score(targets, outputs, average="macro"),
        },
        rel=1e-12,
    )


def test_regression_agrees_with_scipy_and_scikit_learn() -> None:
    spec, outputs, targets = rows_for("regression")
    predicted, actual = outputs.double(), targets.double()
    assert measured(spec, outputs, targets) == pytest.approx(
        {
            "loss": 2.0,
            "pearson": stats.pearsonr(predicted, actual).statistic,
            "spearman": stats.spearmanr(predicted, actual).statistic,
            "mae": sk.mean_absolute_error(actual, predicted),
            "mse": sk.mean_squared_error(actual, predicted),
        },
        rel=1e-12,
    )


@pytest.mark.parametrize(
    "kind", ["classification", "multilabel_classification", "regression", "token_classification", "instruction"]
)
@given(cuts=st.lists(st.integers(0, ROWS), max_size=5), seed=st.integers(0, 5))
@settings(max_examples=8, deadline=None)
def test_the_cut_into_micro_batches_changes_nothing(kind: TaskKind, cuts: list[int], seed: int) -> None:
    spec, outputs, targets = rows_for(kind, seed)
    if kind == "token_classification":
        spec = spec_of(kind, ("O", "B-a", "E-a", "S-a"))
        whole, cut = metrics_for(spec), metrics_for(spec)
        bounds = [0, *sorted(cuts), ROWS]
        counts = [end - start for start, end in itertools.pairwise(bounds)]
        whole.update(outputs, targets, 1.0, ROWS, sequences=counts)
        for start, count in zip(bounds, counts, strict=False):
            part = slice(start, start + count)
            cut.update(outputs[part], targets[part], count / ROWS, count, sequences=[count])
        assert cut.compute() == pytest.approx(whole.compute(), nan_ok=True)
        return
    assert measured(spec, outputs, targets, tuple(cuts)) == measured(spec, outputs, targets)


def test_auroc_does_not_tie_large_scores_as_a_softmax_does() -> None:
    outputs = torch.tensor([[0.0, 100.0], [0.0, 200.0], [0.0, 300.0], [0.0, 400.0]])
    values = measured(spec_of("classification", ("no", "yes")), outputs, torch.tensor([0, 0, 1, 1]))
    assert values["auroc"] == 1.0
    three = torch.cat([outputs, torch.zeros(4, 1)], 1)
    assert measured(spec_of("classification", NAMES[:3]), three, torch.tensor([0, 0, 1, 1]))["auroc"] == 1.0


def test_auroc_uses_probabilities_not_raw_scores() -> None:
    # All in [0, 1], which torchmetrics would take for probabilities as they are.
    outputs = torch.tensor([[0.9, 0.9, 0.9], [0.1, 0.0, 0.8], [0.8, 0.0, 0.0], [0.2, 0.1, 0.9]])
    targets = torch.tensor([0, 1, 0, 2])
    expected = sk.roc_auc_score(targets, outputs.double().softmax(1), multi_class="ovr")
    assert measured(spec_of("classification", NAMES[:3]), outputs, targets)["auroc"] == pytest.approx(expected)


def test_a_class_that_the_evaluation_lacks_is_left_out_of_the_macro_means() -> None:
    outputs, targets = class_rows(3)
    wider = torch.cat([outputs, torch.full((ROWS, 1), -50.0)], 1)
    three = measured(spec_of("classification", NAMES[:3]), outputs, targets)
    assert measured(spec_of("classification"), wider, targets) == pytest.approx(three, rel=1e-9)


def test_one_class_in_the_evaluation_leaves_auroc_and_mcc_undefined() -> None:
    values = measured(spec_of("classification", ("no", "yes")), class_rows(2)[0], torch.zeros(ROWS, dtype=torch.int64))
    assert math.isnan(values["auroc"]) and math.isnan(values["mcc"]) and 0 < values["accuracy"] < 1


def test_one_class_predicted_throughout_has_no_correlation() -> None:
    outputs = torch.tensor([[1.0, 0.0]]).repeat(4, 1)
    targets = torch.tensor([0, 0, 1, 0])
    values = measured(spec_of("classification", ("no", "yes")), outputs, targets)
    assert values["mcc"] == 0.0 == sk.matthews_corrcoef(targets, outputs.argmax(1))
    assert values["auroc"] == 0.5 and values["f1_positive"] == 0.0


@pytest.mark.parametrize("constant", ["outputs", "targets", "both", "one row"])
def test_constant_values_leave_correlations_undefined(constant: str) -> None:
    varied, same = torch.arange(5.0), torch.full((5,), 0.1)
    outputs = same if constant in ("outputs", "both") else varied
    targets = same if constant in ("targets", "both") else varied + 1
    rows = 1 if constant == "one row" else 5
    values = measured(spec_of("regression", ()), outputs[:rows], targets[:rows])
    assert math.isnan(values["pearson"]) and math.isnan(values["spearman"])
    assert math.isfinite(values["mae"]) and math.isfinite(values["mse"])


def test_correlation_survives_a_large_offset_and_a_tiny_spread() -> None:
    outputs = 1000 + torch.arange(8.0) / 1000
    values = measured(spec_of("regression", ()), outputs, outputs * 3)
    assert values["pearson"] == pytest.approx(1.0, abs=1e-4) and values["spearman"] == pytest.approx(1.0)


def test_no_labels_anywhere_leave_f1_undefined() -> None:
    values = measured(spec_of("multilabel_classification"), torch.full((3, 4), -1.0), torch.zeros(3, 4))
    assert math.isnan(values["f1_micro"]) and math.isnan(values["f1_macro"]) and math.isnan(values["auroc"])
    assert values["exact_match"] == 1.0


@pytest.mark.parametrize(
    "kind", ["classification", "multilabel_classification", "regression", "token_classification", "instruction"]
)
def test_an_empty_evaluation_is_nan_throughout_and_reset_forgets(kind: TaskKind) -> None:
    spec, outputs, targets = rows_for(kind)
    metrics = metrics_for(spec)
    empty = metrics.compute()
    assert all(math.isnan(value) for value in empty.values())
    metrics.update(outputs, targets, 1.0, ROWS)
    first = metrics.compute()
    assert tuple(first) == metrics.names == tuple(empty) and not math.isnan(first["loss"])
    metrics.reset()
    assert all(math.isnan(value) for value in metrics.compute().values())
    metrics.update(outputs, targets, 1.0, ROWS)
    assert metrics.compute() == pytest.approx(first, nan_ok=True)


@pytest.mark.parametrize("kind", ["classification", "multilabel_classification", "regression", "token_classification"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outputs_that_are_not_finite_make_every_metric_nan(kind: TaskKind, bad: float) -> None:
    spec, outputs, targets = rows_for(kind)
    broken = outputs.clone()
    broken.view(-1)[7] = bad
    metrics = metrics_for(spec)
    metrics.update(broken, targets, math.nan, ROWS)
    metrics.update(outputs, targets, 1.0, ROWS)
    assert all(math.isnan(value) for value in metrics.compute().values())


def test_perplexity_is_the_exponential_of_the_exact_mean() -> None:
    metrics = metrics_for(spec_of("language_modelling", ()))
    metrics.update(torch.empty(0), torch.zeros(3), torch.tensor(3.0), 3)
    metrics.update(torch.empty(0), torch.zeros(1), torch.tensor(9.0), 1)
    assert metrics.compute() == {"loss": 3.0, "perplexity": pytest.approx(math.exp(3.0))}


def test_perplexity_of_a_hopeless_loss_is_infinite() -> None:
    metrics = metrics_for(spec_of("instruction", ()))
    metrics.update(torch.empty(0), torch.zeros(1), 1e4, 1)
    assert metrics.compute()["perplexity"] == math.inf


def test_scores_of_very_many_classes_are_not_kept() -> None:
    classes = module.AUROC_CLASSES + 1
    metrics = metrics_for(spec_of("classification", tuple(map(str, range(classes)))))
    assert "auroc" not in metrics.names
    metrics.update(torch.eye(classes), torch.arange(classes), 1.0, classes)
    assert metrics.compute()["accuracy"] == 1.0


def test_low_precision_outputs_are_measured_too() -> None:
    spec, outputs, targets = rows_for("classification")
    assert measured(spec, outputs.bfloat16(), targets)["accuracy"] > 0.4


SCHEMES: list[tuple[str, list[tuple[int, int, str]]]] = [
    ("B-x I-x O B-x B-x O", [(0, 2, "x"), (3, 4, "x"), (4, 5, "x")]),
    ("B-x I-y I-y O", [(0, 1, "x"), (1, 3, "y")]),
    ("I-x I-x B-x O I-y", [(0, 2, "x"), (2, 3, "x"), (4, 5, "y")]),
    ("B-x I-x E-x S-x O S-y B-y E-y", [(0, 3, "x"), (3, 4, "x"), (5, 6, "y"), (6, 8, "y")]),
    ("E-x E-x B-x S-x I-x", [(0, 1, "x"), (1, 2, "x"), (2, 3, "x"), (3, 4, "x"), (4, 5, "x")]),
    ("B-x I-x L-x U-x U-y", [(0, 3, "x"), (3, 4, "x"), (4, 5, "y")]),
    ("B_x I_x O", [(0, 2, "x")]),
    ("B M E S B E", [(0, 3, ""), (3, 4, ""), (4, 6, "")]),
    ("O B I I O B", [(1, 4, ""), (5, 6, "")]),
    ("street street city O city", [(0, 2, "street"), (2, 3, "city"), (4, 5, "city")]),
    ("S L L M S", [(0, 1, "S"), (1, 3, "L"), (3, 4, "M"), (4, 5, "S")]),
    ("B-x city city", [(0, 1, "B-x"), (1, 3, "city")]),
    ("O O", []),
]


@pytest.mark.parametrize(("tags", "expected"), SCHEMES, ids=[tags for tags, _ in SCHEMES])
def test_spans_of_every_scheme(tags: str, expected: list[tuple[int, int, str]]) -> None:
    words = tags.split()
    names = sorted(set(words))
    meaning = dict(zip(names, read_tags(names), strict=True))
    assert spans(meaning[word] for word in words) == set(expected)


def tag_metrics(names: tuple[str, ...], predicted: str, actual: str, sequences: list[int]) -> dict[str, float]:
    metrics = metrics_for(spec_of("token_classification", names))
    ids = torch.tensor([names.index(tag) for tag in predicted.split()])
    outputs = torch.nn.functional.one_hot(ids, len(names)).float()
    targets = torch.tensor([names.index(tag) for tag in actual.split()])
    metrics.update(outputs, targets, 1.0, len(targets), sequences=sequences)
    return metrics.compute()


def test_span_scores_count_borders_and_types() -> None:
    # By hand: 3 spans predicted, 3 there; only the first (0-2, x) is right: the second is too short, the third a y.
    values = tag_metrics(("O", "B-x", "I-x", "B-y"), "B-x I-x O B-x O B-y", "B-x I-x O B-x I-x B-x", [6])
    assert values == pytest.approx({"loss": 1 / 6, "accuracy": 4 / 6, "precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3})


def test_spans_end_where_an_example_ends() -> None:
    names = ("O", "city")
    one = tag_metrics(names, "city city city O", "city city city O", [4])
    two = tag_metrics(names, "city city city city", "city city O city", [2, 2])
    assert one["f1"] == 1.0
    # Examples (0-2) and (2-4): there 0-2 and 3-4, predicted 0-2 and 2-4.
    assert two["precision"] == two["recall"] == 0.5


def test_nothing_predicted_leaves_precision_undefined_and_f1_zero() -> None:
    values = tag_metrics(("O", "B-x"), "O O", "B-x O", [2])
    assert math.isnan(values["precision"]) and values["recall"] == 0.0 and values["f1"] == 0.0
    assert math.isnan(tag_metrics(("O", "B-x"), "O O", "O O", [2])["f1"])


@given(tags=st.lists(st.sampled_from(["O", "B-x", "I-x", "E-x", "S-x", "I-y"]), max_size=12))
def test_spans_cover_the_marked_words_once(tags: list[str]) -> None:
    names = ["O", "B-x", "I-x", "E-x", "S-x", "I-y"]
    meaning = dict(zip(names, read_tags(names), strict=True))
    found = sorted(spans(meaning[tag] for tag in tags))
    covered = [word for start, end, _ in found for word in range(start, end)]
    assert covered == [place for place, tag in enumerate(tags) if tag != "O"]


@pytest.mark.parametrize(
    ("kind", "best"),
    [
        ("classification", "accuracy"),
        ("multilabel_classification", "f1_micro"),
        ("regression", "loss"),
        ("token_classification", "f1"),
        ("instruction", "loss"),
        ("language_modelling", "loss"),
    ],
)
def test_every_task_has_a_metric_that_picks_the_best(kind: TaskKind, best: str) -> None:
    metrics = metrics_for(spec_of(kind))
    assert metrics.default_best == best and metrics.check_name(best) == best
    lower = {name for name in metrics.names if not metrics.higher_is_better(name)}
    assert lower == {"loss", "perplexity", "mae", "mse"} & set(metrics.names)


def test_an_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(JobError, match=r"'acuracy', which is not measured for classification.*'accuracy'\?"):
        metrics_for(spec_of("classification")).check_name("acuracy")
    with pytest.raises(JobError, match="Known: loss, perplexity"):
        metrics_for(spec_of("instruction")).higher_is_better("accuracy")


def test_making_metrics_imports_nothing_heavy() -> None:
    code = (
        "import sys; from trimtab.data.task import TaskSpec; from trimtab.train.metrics import metrics_for; "
        "metrics_for(TaskSpec('regression', ('text',))); "
        "sys.exit(bool({'torchmetrics', 'transformers', 'sklearn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_whole_numbers_stay_exact_beyond_float32() -> None:
    metrics: Any = metrics_for(spec_of("classification", ("no", "yes")))
    assert isinstance(metrics, TaskMetrics)
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    metrics.update(outputs, torch.tensor([0, 1]), 2.0**25 + 1, 2**25 + 1)
    metrics.update(outputs, torch.tensor([1, 1]), 0.0, 2)
    assert metrics.compute()["loss"] == (2**25 + 1) / (2**25 + 3)
    assert metrics.compute()["accuracy"] == 0.75
    assert np.isclose(metrics.compute()["mcc"], sk.matthews_corrcoef([0, 1, 1, 1], [0, 1, 0, 1]))
