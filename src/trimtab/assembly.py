"""Builds a text task's run from a job: model, method, objective, strategy, groups, evaluation. Trains nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.data.groups import GroupPlan, MicroBatchLimit, evaluation_parts
from trimtab.data.sources import StoreSource
from trimtab.data.task import IGNORED, LANGUAGE_KINDS, TaskSpec
from trimtab.data.tokenize import TokenStore
from trimtab.errors import JobError
from trimtab.hardware.probe import Device, find_device
from trimtab.intake import Intake
from trimtab.job import Job, Precision
from trimtab.kernels.host_memory import keep_freed_memory
from trimtab.models import adapters, blocks, load
from trimtab.models.objective import TextObjective, build_objective
from trimtab.parallel.strategy import OneDevice, autocast
from trimtab.planning.settings import (
    Arithmetic,
    Compute,
    Learning,
    Setting,
    Shape,
    decide_arithmetic,
    decide_compute,
    decide_warmup,
    default_learning_rate,
    learning_settings,
)
from trimtab.train.evaluate import evaluate
from trimtab.train.loop import Metrics
from trimtab.train.metrics import metrics_for
from trimtab.train.optim import OptimizerSettings

_MEASURE_SLOTS = 4096


@dataclass(frozen=True)
class Assembled:
    """All parts of a run, built."""

    loaded: load.Loaded
    applied: adapters.Applied
    objective: TextObjective
    strategy: OneDevice
    source: StoreSource
    plan: GroupPlan
    compute: Compute
    learning: Learning
    settings: tuple[Setting, ...]
    evaluate: Callable[[MicroBatchLimit], Metrics] | None


def assemble(job: Job, intake: Intake, *, decided: Compute | None = None) -> Assembled:
    """Loads the model and wires everything to it.

    `decided` is what an earlier start of the same run decided; a resume keeps it, so that it continues bit for bit.
    """
    device = find_device(decided.device if decided else job.machine.device)
    shape = shape_of(intake)
    arithmetic, settings = _arithmetic(job, device, shape, decided)
    if arithmetic.threads:
        torch.set_num_threads(arithmetic.threads)
    if device.type == "cpu":
        keep_freed_memory()
    weights = class_weights(job, intake.train)
    loaded, applied, objective = _model(job, intake, device, arithmetic.precision, weights)
    padded_reason = None if objective.layout == "flat" else objective.reason
    compute, more = decide_compute(job.machine, device, arithmetic, shape, padded_reason)
    compute = decided or compute
    plan = GroupPlan(
        lengths=np.asarray(intake.train.lengths),
        weights=example_weights(intake.train, weights),
        batch_size=job.training.batch_size,
        epochs=job.training.epochs,
        seed=job.training.seed,
        limit=compute.limit(),
        max_steps=job.training.max_steps,
        group_by_length=job.training.group_by_length,
    )
    learning, reasons = _learning(job, intake, plan.steps)
    strategy = OneDevice(
        objective,
        device=device.torch_device,
        precision=arithmetic.precision,
        settings=OptimizerSettings(learning.learning_rate, job.training.weight_decay),
        max_grad_norm=job.training.max_grad_norm,
    )
    method = Setting("method", job.method.kind, applied.description.rstrip("."))
    return Assembled(
        loaded=loaded,
        applied=applied,
        objective=objective,
        strategy=strategy,
        source=StoreSource(intake.train, objective.layout, intake.tokenizer.pad_id, weights),
        plan=plan,
        compute=compute,
        learning=learning,
        settings=(*settings, method, *more, *learning_settings(job, learning, plan.steps, reasons)),
        evaluate=_evaluation(job, intake, objective, strategy, weights),
    )


def shape_of(intake: Intake) -> Shape | None:
    """The model's sizes, as far as its config tells them. The inner width is the usual four times the width."""
    width, layers = intake.facts.hidden_size, intake.facts.num_layers
    return None if width is None or layers is None else Shape(width=width, inner=4 * width, layers=layers)


def _arithmetic(
    job: Job, device: Device, shape: Shape | None, decided: Compute | None
) -> tuple[Arithmetic, list[Setting]]:
    if decided is None:
        return decide_arithmetic(job.machine, device, shape)
    kept = Arithmetic(decided.precision, decided.threads, decided.gemm_flops_per_second)
    return kept, [Setting("precision", decided.precision, "as this run began")]


def _model(
    job: Job, intake: Intake, device: Device, precision: Precision, weights: tuple[float, ...] | None
) -> tuple[load.Loaded, adapters.Applied, TextObjective]:
    seed = job.training.seed
    loaded = load.load_model(
        intake.folder,
        intake.facts,
        intake.spec,
        dropout=job.model.dropout,
        dtype=_base_type(job, intake.spec, precision),
        seed=seed,
        pad_id=intake.tokenizer.pad_id,
    )
    if intake.spec.kind == "regression":
        _centre_head(loaded, float(np.mean(intake.train.label_array())))
    applied = adapters.apply_method(loaded.model, job.method, intake.spec, seed=seed, new_weights=loaded.new_weights)
    applied.model.to(device.torch_device)
    # Under autocast a card's flat attention sees 16-bit inputs, which is what its check must see too.
    checked_under = nullcontext() if device.type == "cpu" else autocast(device.torch_device, precision)
    with checked_under:
        objective = build_objective(
            applied.model,
            intake.spec,
            layout="flat",
            pad_id=intake.tokenizer.pad_id,
            class_weights=weights,
            label_smoothing=job.task.label_smoothing,
            longest=int(intake.train.lengths.max()),
        )
    applied.model.train()
    return loaded, applied, objective


def _centre_head(loaded: load.Loaded, mean: float) -> None:
    """Has a new regression head begin at the mean of the training targets: from 0, targets far from it cost epochs."""
    for name, parameter in loaded.model.named_parameters():
        if name in loaded.new_weights and name.endswith("bias") and parameter.numel() == 1:
            parameter.data.fill_(mean)


def _base_type(job: Job, spec: TaskSpec, precision: Precision) -> torch.dtype:
    """Trained weights load in float32. A base that stays frozen under LoRA needs no more than the type it runs in.

    A task with a new head has a trained float32 module on top of the base, so there the base waits for the strategy.
    """
    if job.method.kind != "lora" or spec.kind not in LANGUAGE_KINDS:
        return torch.float32
    types = {"bf16": torch.bfloat16, "bf16_weights": torch.bfloat16, "fp16": torch.float16}
    return types.get(precision, torch.float32)


def _learning(job: Job, intake: Intake, steps: int) -> tuple[Learning, dict[str, str]]:
    rate, rate_reason = default_learning_rate(job.method, job.training)
    learning = Learning(rate, decide_warmup(job.training, steps), intake.options.max_length)
    return learning, {"learning_rate": rate_reason, "max_length": intake.max_length_reason}


def class_weights(job: Job, store: TokenStore) -> tuple[float, ...] | None:
    """The weight of each class in the loss; `balanced` is inverse frequency with a mean of 1 over the examples."""
    wish, spec = job.task.class_weights, store.spec
    if wish is None:
        return None
    names = spec.label_names
    if wish != "balanced":
        if len(wish) != len(names) or min(wish) <= 0:
            raise JobError(
                f"task.class_weights needs {len(names)} numbers above 0, one for each of {', '.join(names)}; "
                f"it has {len(wish)}.",
                cure="Or use task.class_weights: balanced.",
            )
        return tuple(wish)
    counts = _class_counts(store)
    return tuple(float(counts.sum() / (len(names) * max(count, 1))) for count in counts)


def _class_counts(store: TokenStore) -> NDArray[np.int64]:
    classes = len(store.spec.label_names)
    if store.spec.kind == "classification":
        return np.bincount(store.label_array(), minlength=classes)
    if store.spec.kind == "multilabel_classification":
        return store.label_array().sum(0).astype(np.int64)
    return store.tag_counts(classes)


def example_weights(store: TokenStore, weights: tuple[float, ...] | None) -> NDArray[np.float64]:
    """[examples] what each adds to the denominator of its group: its targets, times their weights."""
    if weights is None or store.spec.kind == "multilabel_classification":
        return np.asarray(store.target_counts, dtype=np.float64)
    table = np.asarray(weights, dtype=np.float64)
    if store.spec.kind == "classification":
        return table[store.label_array()]
    labels = (store.labels(index) for index in range(len(store)))
    return np.array([table[one[one != IGNORED]].sum() for one in labels])


def _evaluation(
    job: Job,
    intake: Intake,
    objective: TextObjective,
    strategy: OneDevice,
    weights: tuple[float, ...] | None,
) -> Callable[[MicroBatchLimit], Metrics] | None:
    if intake.eval is None:
        return None
    metrics = metrics_for(intake.spec)
    name = metrics.check_name(job.training.best_metric) if job.training.best_metric else metrics.default_best
    source = StoreSource(intake.eval, objective.layout, intake.tokenizer.pad_id, weights)
    store = intake.eval

    def run(limit: MicroBatchLimit) -> Metrics:
        parts = evaluation_parts(np.asarray(store.lengths), limit)
        batches = strategy.place(source.batch(part, 0) for part in parts)
        with strategy.evaluation():
            values = evaluate(objective, batches, intake.spec)
        return Metrics(values, name, metrics.higher_is_better(name))

    return run


def measure(
    model: torch.nn.Module,
    pad_id: int,
    store: TokenStore,
    device: torch.device,
    weights: tuple[float, ...] | None = None,
) -> dict[str, float]:
    """Metrics of a finished model on a store; `weights` are the class weights that its loss was trained with."""
    model.to(device)
    objective = build_objective(
        model,
        store.spec,
        layout="flat",
        pad_id=pad_id,
        class_weights=weights,
        longest=int(store.lengths.max()),
    )
    source = StoreSource(store, objective.layout, pad_id, weights)
    limit = MicroBatchLimit(_MEASURE_SLOTS, layout=objective.layout)
    parts = evaluation_parts(np.asarray(store.lengths), limit)
    with torch.inference_mode():
        return evaluate(objective, (source.batch(part, 0).to(device) for part in parts), store.spec)


def restore_frozen(job: Job, intake: Intake, assembled: Assembled) -> None:
    """Puts frozen weights that ran in bf16 back to what the base model has, before a whole model is written."""
    model = assembled.applied.model
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if adapters.is_adapted(model) or assembled.compute.precision != "bf16_weights" or not frozen:
        return
    fresh = load.load_model(
        intake.folder,
        intake.facts,
        intake.spec,
        dropout=job.model.dropout,
        seed=job.training.seed,
        pad_id=intake.tokenizer.pad_id,
    )
    originals = dict(fresh.model.named_parameters())
    for name, parameter in frozen.items():
        parameter.data = originals[name].data.to(parameter.device)


def gemm_share(assembled: Assembled, tokens: int, seconds: float) -> float | None:
    """Share of the machine's measured product rate that training reached, by the model's own products."""
    rate = assembled.compute.gemm_flops_per_second
    if not rate or seconds <= 0:
        return None
    store = assembled.source.store
    flops_per_token = _flops_per_token(assembled, float(store.target_counts.sum() / store.lengths.sum()))
    return min(1.0, flops_per_token * tokens / seconds / rate)


def _flops_per_token(assembled: Assembled, targets_per_token: float) -> float:
    """Two operations a weight and pass: forward, gradient of the input, and of the weight where it trains.

    No gradient goes below the first weight that trains, and a head computes only the positions with a target.
    """
    model, total, below = assembled.applied.model, 0.0, True
    heads = tuple(f"{name}." for name in blocks.head_names(model))
    for name, module in model.named_modules():
        trains = [p.requires_grad for p in module.parameters(recurse=False)]
        if isinstance(module, torch.nn.Linear):
            passes = 1 + any(trains) + (not below)
            share = targets_per_token if f"{name}.".startswith(heads) else 1.0
            total += 2.0 * passes * share * math.prod(module.weight.shape)
        below = below and not any(trains)
    return total


def plan_document(assembled: Assembled) -> dict[str, Any]:
    """`plan.json`: what was decided, and why."""
    return {
        "compute": assembled.compute.to_dict(),
        "learning": {
            "learning_rate": assembled.learning.learning_rate,
            "warmup_steps": assembled.learning.warmup_steps,
            "max_length": assembled.learning.max_length,
            "steps": assembled.plan.steps,
        },
        "settings": [{"name": line.name, "value": line.value, "reason": line.reason} for line in assembled.settings],
    }
