"""The training loop: walks over optimizer steps, and over nothing smaller.

It receives everything that it drives and knows no device, type or model. A step either is applied whole or leaves no
trace: an error for lack of memory runs the same group again in smaller pieces, a loss or gradient that is not finite
changes no weight, and a wish to stop is heard between steps only.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from trimtab.data.groups import GroupPlan, MicroBatchLimit, slots_of
from trimtab.errors import MachineError, NotFiniteError
from trimtab.parallel.strategy import Strategy, is_out_of_memory
from trimtab.train.feed import FedGroup, GroupFeed
from trimtab.train.optim import LearningRate

Emit = Callable[..., None]
"""`emit(kind, **fields)` records an event."""

DATA_WAIT_SHARE = 0.02
"""Waiting for data is worth a word from this share of the training time on."""


class Saver(Protocol):
    """Keeps checkpoints (see `trimtab.train.checkpoint.CheckpointStore`)."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        is_best: bool = False,
    ) -> Any: ...


@dataclass(frozen=True)
class Metrics:
    """Result of one evaluation."""

    values: dict[str, float]
    name: str
    """The metric that picks the best checkpoint."""
    higher_is_better: bool

    @property
    def chosen(self) -> float:
        return self.values[self.name]


@dataclass(frozen=True)
class LoopPolicy:
    """When to evaluate, save and stop."""

    eval_every: int | None
    """Steps between evaluations; None: at the end of each epoch."""
    checkpoint_every: int | None
    """Steps between checkpoints; None: at each evaluation and every `checkpoint_seconds`."""
    checkpoint_seconds: float = 600.0
    early_stopping: int | None = None
    """Evaluations without a better metric before the run ends; None: never."""
    not_finite_limit: int = 5
    """Steps in a row without a finite gradient before the run stops."""


@dataclass(frozen=True)
class Progress:
    """All that a resumed run must know beside tensors. Written as JSON into each checkpoint."""

    step: int = 0
    slots_limit: int | None = None
    """The micro-batch limit where it was lowered for lack of memory."""
    best_value: float | None = None
    best_loss: float = sys.float_info.max
    """Of the best evaluation; JSON has no infinity."""
    best_step: int | None = None
    evals_without_better: int = 0
    skipped_in_a_row: int = 0
    skipped_steps: int = 0
    train_seconds: float = 0.0
    wait_seconds: float = 0.0
    tokens: int = 0
    early_stopped: bool = False

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Reads what `as_state` wrote."""
        return cls(**{name: state[name] for name in cls.__dataclass_fields__})

    def as_state(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LoopResult:
    """How a run ended."""

    progress: Progress
    finished: bool
    """False when it was asked to stop."""
    metrics: dict[str, float]
    """Of the last evaluation; empty where there is none."""


@dataclass(kw_only=True)
class Loop:
    """Drives one run from `progress` to its last step."""

    plan: GroupPlan
    feed: GroupFeed
    strategy: Strategy
    learning_rate: LearningRate
    policy: LoopPolicy
    emit: Emit
    saver: Saver
    stop_requested: Callable[[], bool]
    evaluate: Callable[[MicroBatchLimit], Metrics] | None = None
    explain_not_finite: Callable[[FedGroup], str] = lambda fed: "an unnamed module"
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.limit = self.plan.limit
        if self.progress.slots_limit is not None:
            self.limit = replace(self.limit, slots=self.progress.slots_limit)
        self._metrics: dict[str, float] = {}
        self._saved_step = self.progress.step
        self._saved_at = time.monotonic()

    def run(self) -> LoopResult:
        """Trains until the last step, an early stop, or a wish to stop."""
        while self.progress.step < self.plan.steps and not self.progress.early_stopped:
            if self.stop_requested():
                self._save()
                return LoopResult(self.progress, finished=False, metrics=self._metrics)
            self._step(self.progress.step + 1)
            better = self._evaluate_when_due()
            self._save_when_due(better)
        self._save()
        return LoopResult(self.progress, finished=True, metrics=self._metrics)

    def _step(self, step: int) -> None:
        start = time.perf_counter()
        fed, loss = self._run_group(step)
        rate = self.learning_rate.at(step)
        norm, applied, scale_lowered = self._apply(loss, rate)
        seconds = time.perf_counter() - start
        skipped = 0 if applied or scale_lowered else self.progress.skipped_in_a_row + 1
        self.progress = replace(
            self.progress,
            step=step,
            skipped_in_a_row=skipped,
            skipped_steps=self.progress.skipped_steps + (not applied),
            train_seconds=self.progress.train_seconds + seconds,
            wait_seconds=self.progress.wait_seconds + fed.wait_seconds,
            tokens=self.progress.tokens + fed.group.tokens,
        )
        self.emit(
            "step",
            step=step,
            steps=self.plan.steps,
            epoch=fed.group.epoch,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            examples=fed.group.examples,
            tokens=fed.group.tokens,
            target_tokens=fed.group.denominator,
            micro_batches=len(fed.batches),
            step_seconds=seconds,
            data_wait_seconds=fed.wait_seconds,
            peak_bytes=self.strategy.peak_bytes(),
            applied=applied,
        )
        if skipped:
            self._not_finite(fed, loss, norm, skipped)

    def _apply(self, loss: float, rate: float) -> tuple[float, bool, bool]:
        """Steps unless the loss is not finite: (gradient norm, applied, loss scale lowered)."""
        outcome = self.strategy.apply(rate, allowed=math.isfinite(loss))
        return outcome.grad_norm, outcome.applied, outcome.scale_lowered

    def _run_group(self, step: int) -> tuple[FedGroup, float]:
        """Forwards and backwards of a step; in smaller pieces each time the memory does not suffice."""
        while True:
            fed = self.feed.take(step, self.limit)
            try:
                return fed, self.strategy.run_group(fed.batches, fed.group.denominator, fed.seeds)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).split("\n", maxsplit=1)[0]
            # Here the error is gone, and with it the frames that held the group's tensors.
            self.strategy.free_memory()
            self._lower_limit(fed, reason)

    def _lower_limit(self, fed: FedGroup, reason: str) -> None:
        parts = fed.group.micro_batches
        largest = max(slots_of(part, self.plan.lengths, self.limit.layout) for part in parts)
        smaller = self.limit.halved(largest)
        if smaller is None or all(len(part) == 1 for part in parts):
            raise MachineError(
                f"step {fed.group.step} does not fit into memory even one example at a time "
                f"({largest} positions in the longest): {reason}.",
                cure="Use a smaller training.max_length, method.kind: lora, or a smaller model.",
            )
        self.limit = smaller
        self.progress = replace(self.progress, slots_limit=smaller.slots)
        self.emit(
            "warning",
            code="out_of_memory",
            message=f"out of memory at step {fed.group.step} with {largest} positions in one micro-batch; "
            f"the same step runs again with at most {smaller.slots}",
            cure="Nothing to do: what is learned does not change.",
        )

    def _not_finite(self, fed: FedGroup, loss: float, norm: float, skipped: int) -> None:
        """Says that a step changed nothing; stops after too many in a row."""
        step = fed.group.step
        message = f"step {step}: loss {loss:g}, gradient norm {norm:g}; the step was skipped, no weight changed"
        self.emit("warning", code="not_finite", message=message, cure="")
        if skipped < min(self.policy.not_finite_limit, self.plan.steps):  # a short run has not learned either
            return
        where = self.explain_not_finite(fed)
        # The weights are those of the last good step, since skipped steps change none.
        self._save()
        raise NotFiniteError(
            f"{skipped} steps in a row (to step {step}) had no finite loss or gradient; first in {where}. "
            f"The weights of step {step - skipped} are kept.",
            cure="Lower training.learning_rate, set machine.precision: fp32, or look at the data of these steps.",
        )

    def _evaluate_when_due(self) -> bool:
        """Evaluates if the step asks for it; True when the result is the best so far."""
        step = self.progress.step
        every = self.policy.eval_every or self.plan.steps_per_epoch
        if self.evaluate is None or (step % every and step < self.plan.steps):
            return False
        start = time.perf_counter()
        result = self._evaluate(self.evaluate)
        self._metrics = result.values
        better = self._note_metric(result)
        self.emit("eval", step=step, metrics=result.values, seconds=time.perf_counter() - start, is_best=better)
        return better

    def _evaluate(self, measure: Callable[[MicroBatchLimit], Metrics]) -> Metrics:
        """The whole set from its start, in smaller pieces each time the memory does not suffice.

        The limit of training stays: evaluation sorts the whole set by length, so its pieces are the heaviest there are.
        """
        limit = self.limit
        while True:
            try:
                return measure(limit)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).split("\n", maxsplit=1)[0]
            self.strategy.free_memory()
            smaller, step = limit.halved(limit.slots), self.progress.step
            if smaller is None:
                raise MachineError(
                    f"the evaluation after step {step} does not fit into memory even one example at a time: {reason}.",
                    cure="Use a smaller training.max_length, or evaluate on shorter texts.",
                )
            self.emit(
                "warning",
                code="out_of_memory",
                message=f"out of memory in the evaluation after step {step} with {limit.slots} positions in one "
                f"micro-batch; it runs again with at most {smaller.slots}",
                cure="Nothing to do: the metrics do not change.",
            )
            limit = smaller

    def _note_metric(self, result: Metrics) -> bool:
        best, value = self.progress.best_value, result.chosen
        sign = 1 if result.higher_is_better else -1
        loss = min(result.values.get("loss", math.inf), sys.float_info.max)
        above = best is None or sign * value > sign * best
        # Metrics that count, such as accuracy, often tie; of equals the surer model is better.
        tied = value == best and loss < self.progress.best_loss
        better = math.isfinite(value) and (above or tied)
        without = 0 if better else self.progress.evals_without_better + 1
        patience = self.policy.early_stopping
        self.progress = replace(
            self.progress,
            best_value=value if better else best,
            best_loss=loss if better and math.isfinite(loss) else self.progress.best_loss,
            best_step=self.progress.step if better else self.progress.best_step,
            evals_without_better=without,
            early_stopped=patience is not None and without >= patience,
        )
        return better

    def _save_when_due(self, better: bool) -> None:
        step, every = self.progress.step, self.policy.checkpoint_every
        evaluated = self.evaluate is not None and step % (self.policy.eval_every or self.plan.steps_per_epoch) == 0
        overdue = time.monotonic() - self._saved_at >= self.policy.checkpoint_seconds
        due = overdue or evaluated if every is None else step % every == 0
        if better or due:
            self._save(better)

    def _save(self, better: bool = False) -> None:
        if self._saved_step == self.progress.step:
            return
        self.saver.save(
            self.progress.step,
            self.strategy.tensors(),
            {"progress": self.progress.as_state(), "strategy": self.strategy.scalars()},
            metric=self.progress.best_value if better else None,
            is_best=better,
        )
        self._saved_step, self._saved_at = self.progress.step, time.monotonic()
