"""The loop: steps are whole or leave no trace, whatever goes wrong between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trimtab.data.groups import GroupPlan, Indices, MicroBatchLimit
from trimtab.errors import MachineError, NotFiniteError
from trimtab.parallel.strategy import OneDevice
from trimtab.train.feed import GroupFeed
from trimtab.train.loop import Loop, LoopPolicy, Metrics, Progress
from trimtab.train.optim import LearningRate, OptimizerSettings
from trimtab.train.recover import first_non_finite

EXAMPLES = 22


class Regression:
    """A net with dropout on fixed random data; `fail(step_calls)` may raise or spoil a forward."""

    in_background = True

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.module: nn.Module = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1))
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(EXAMPLES, 5, generator=generator)
        self.targets = self.inputs.sum(1)
        self.seen: list[list[int]] = []
        self.spoil: Callable[[list[int]], float] = lambda rows: 1.0

    def batch(self, indices: Indices, epoch: int) -> Any:
        return torch.from_numpy(indices), self.inputs[indices], self.targets[indices]

    def loss_sum(self, batch: Any) -> Tensor:
        rows, inputs, targets = batch
        factor = self.spoil(rows.tolist())
        self.seen.append(rows.tolist())
        return (self.module(inputs)[:, 0] - targets).square().sum() * factor


class Memory:
    """Keeps checkpoints in memory, cloned."""

    def __init__(self) -> None:
        self.saves: list[tuple[int, dict[str, dict[str, Tensor]], dict[str, Any], bool]] = []

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        is_best: bool = False,
    ) -> None:
        copy = {kind: {n: t.clone() for n, t in group.items()} for kind, group in tensors.items()}
        self.saves.append((step, copy, dict(state), is_best))


class Bench:
    """A loop with its parts at hand."""

    def __init__(self, epochs: float = 3.0, slots: int = 100, **changes: Any) -> None:
        self.work = Regression()
        self.events: list[dict[str, Any]] = []
        self.memory = Memory()
        self.stop_at: int | None = None
        self.strategy = OneDevice(
            self.work,
            device=torch.device("cpu"),
            precision="fp32",
            settings=OptimizerSettings(learning_rate=0.01, weight_decay=0.0),
            max_grad_norm=1.0,
        )
        ones = np.ones(EXAMPLES, dtype=np.int32)
        self.plan = GroupPlan(
            lengths=ones,
            weights=ones.astype(np.float64),
            batch_size=8,
            epochs=epochs,
            seed=5,
            limit=MicroBatchLimit(slots=slots),
        )
        self.changes = changes

    def loop(self, progress: Progress | None = None) -> Loop:
        settings: dict[str, Any] = {
            "plan": self.plan,
            "feed": GroupFeed(self.plan, self.work, self.strategy.stage),
            "strategy": self.strategy,
            "learning_rate": LearningRate(0.01, "linear", 1, self.plan.steps),
            "policy": LoopPolicy(eval_every=None, checkpoint_every=None),
            "emit": lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            "saver": self.memory,
            "stop_requested": lambda: self.stop_at is not None and len(self.of("step")) >= self.stop_at,
            "explain_not_finite": lambda fed: first_non_finite(self.work, fed.batches),
            "progress": progress or Progress(),
        }
        return Loop(**(settings | self.changes))

    def run(self, progress: Progress | None = None) -> Any:
        loop = self.loop(progress)
        with loop.feed:
            return loop.run()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def weights(self) -> dict[str, Tensor]:
        return self.strategy.tensors()["weights"]


def losses(bench: Bench) -> list[float]:
    return [event["loss"] for event in bench.of("step")]


def test_a_run_takes_every_step_and_learns() -> None:
    bench = Bench(epochs=20.0)
    result = bench.run()
    assert result.finished
    assert [event["step"] for event in bench.of("step")] == list(range(1, bench.plan.steps + 1))
    assert sum(losses(bench)[-3:]) < 0.2 * sum(losses(bench)[:3])
    assert bench.memory.saves[-1][0] == bench.plan.steps


@pytest.mark.parametrize("slots", [1, 2, 5, 100])
def test_micro_batches_change_nothing_that_is_learned(slots: int) -> None:
    whole, cut = Bench(), Bench(slots=slots)
    whole.run()
    cut.run()
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 8])
def test_a_stopped_and_resumed_run_ends_bit_for_bit_the_same(stop_at: int) -> None:
    whole = Bench()
    whole.work.module[2].p = 0.3  # type: ignore[index]
    whole.run()
    first, second = Bench(), Bench()
    for bench in (first, second):
        bench.work.module[2].p = 0.3  # type: ignore[index]
    first.stop_at = stop_at
    assert not first.run().finished
    step, tensors, state, _ = first.memory.saves[-1]
    assert step == stop_at
    second.strategy.load(tensors, state["strategy"])
    second.run(Progress.from_state(state["progress"]))
    assert losses(first) + losses(second) == losses(whole)
    for name, tensor in whole.weights().items():
        assert torch.equal(tensor, second.weights()[name]), name


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("fake: out of memory"), MemoryError("fake")])
def test_out_of_memory_runs_the_same_step_in_smaller_pieces(error: Exception) -> None:
    whole, squeezed = Bench(), Bench()
    whole.run()

    def fail_when_large(rows: list[int]) -> float:
        if len(squeezed.of("step")) >= 1 and len(rows) > 2:
            raise error
        return 1.0

    squeezed.work.spoil = fail_when_large
    squeezed.run()
    assert losses(squeezed) == pytest.approx(losses(whole), rel=1e-6)
    assert [event["code"] for event in squeezed.of("warning")] == ["out_of_memory", "out_of_memory"]
    assert squeezed.of("step")[1]["micro_batches"] == 4
    assert squeezed.memory.saves[-1][2]["progress"]["slots_limit"] == 2


def test_one_example_too_large_for_the_memory_is_named() -> None:
    bench = Bench()

    def fail(rows: list[int]) -> float:
        raise torch.OutOfMemoryError("fake: out of memory")

    bench.work.spoil = fail
    with pytest.raises(MachineError, match=r"step 1 does not fit into memory even one example at a time.*max_length"):
        bench.run()


def test_other_errors_are_not_taken_for_lack_of_memory() -> None:
    bench = Bench()

    def fail(rows: list[int]) -> float:
        raise RuntimeError("shape mismatch")

    bench.work.spoil = fail
    with pytest.raises(RuntimeError, match="shape mismatch"):
        bench.run()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(bad: float) -> None:
    bench = Bench()
    at_step: list[dict[str, Tensor]] = []

    def spoil(rows: list[int]) -> float:
        at_step.append({name: tensor.clone() for name, tensor in bench.weights().items()})
        return bad if len(bench.of("step")) == 3 else 1.0

    bench.work.spoil = spoil
    result = bench.run()
    assert all(torch.equal(at_step[3][name], at_step[4][name]) for name in at_step[3])
    assert result.progress.skipped_steps == 1
    assert [event["applied"] for event in bench.of("step")].count(False) == 1
    assert not math.isfinite(bench.of("step")[3]["loss"])


def test_too_many_bad_steps_stop_with_the_last_good_weights_and_a_name() -> None:
    bench = Bench()
    good: dict[str, Tensor] = {}

    def spoil(rows: list[int]) -> float:
        if len(bench.of("step")) < 2:
            return 1.0
        good.update({name: tensor.clone() for name, tensor in bench.weights().items()})
        return float("nan")

    bench.work.spoil = spoil
    with pytest.raises(NotFiniteError, match=r"5 steps in a row .to step 7.*the loss itself.*learning_rate"):
        bench.run()
    step, tensors, _, _ = bench.memory.saves[-1]
    assert step == len(bench.of("step")) == 7
    assert all(torch.equal(tensor, good[name]) for name, tensor in tensors["weights"].items())


def test_the_first_module_that_overflows_is_named() -> None:
    work = Regression()
    work.module[3].weight.data.fill_(3e38)  # type: ignore[index,union-attr]
    batch = work.batch(np.arange(4), 0)
    assert first_non_finite(work, [batch]) == "the output of 3"
    work.module[0].weight.data[0, 0] = float("nan")  # type: ignore[index,union-attr]
    assert first_non_finite(work, [batch]) == "the weight 0.weight"


def evaluation(values: list[float], higher: bool = True) -> Callable[[MicroBatchLimit], Metrics]:
    left = iter(values)
    return lambda limit: Metrics({"score": next(left)}, "score", higher)


def test_an_evaluation_out_of_memory_runs_again_in_smaller_pieces() -> None:
    asked: list[int] = []

    def measure(limit: MicroBatchLimit) -> Metrics:
        asked.append(limit.slots)
        if limit.slots > 2:
            raise torch.OutOfMemoryError("fake: out of memory")
        return Metrics({"score": 1.0}, "score", True)

    bench = Bench(evaluate=measure, slots=8)
    assert bench.run().finished
    assert asked[:3] == [8, 4, 2] and len(bench.of("eval")) == 3
    assert {event["code"] for event in bench.of("warning")} == {"out_of_memory"}
    assert bench.memory.saves[-1][2]["progress"]["slots_limit"] is None


def test_an_evaluation_that_never_fits_is_named() -> None:
    def measure(limit: MicroBatchLimit) -> Metrics:
        raise MemoryError("fake")

    with pytest.raises(MachineError, match=r"the evaluation after step 3 does not fit.*max_length"):
        Bench(evaluate=measure).run()


@pytest.mark.parametrize(("higher", "best_step"), [(True, 6), (False, 9)])
def test_the_best_checkpoint_follows_the_metric(higher: bool, best_step: int) -> None:
    bench = Bench(evaluate=evaluation([0.5, 0.7, 0.4], higher))
    result = bench.run()
    assert result.progress.best_step == best_step
    assert [step for step, _, _, best in bench.memory.saves if best][-1] == best_step
    assert [event["step"] for event in bench.of("eval")] == [3, 6, 9]


def test_early_stopping_counts_evaluations_without_a_better_metric() -> None:
    policy = LoopPolicy(eval_every=1, checkpoint_every=None, early_stopping=2)
    bench = Bench(epochs=9.0, evaluate=evaluation([0.1, 0.5, 0.4, 0.5, 0.9]), policy=policy)
    result = bench.run()
    assert result.finished and result.progress.early_stopped
    assert result.progress.step == 4
    assert result.progress.best_step == 2


def test_of_equal_metrics_the_one_with_the_lower_loss_is_best() -> None:
    left = iter([(0.5, 0.9), (0.7, 0.6), (0.7, 0.4), (0.7, 0.5)])

    def evaluate(limit: MicroBatchLimit) -> Metrics:
        score, loss = next(left)
        return Metrics({"loss": loss, "score": score}, "score", True)

    bench = Bench(epochs=4.0, evaluate=evaluate)
    assert bench.run().progress.best_step == 9


def test_a_metric_that_is_not_finite_is_never_the_best() -> None:
    bench = Bench(evaluate=evaluation([float("nan"), 0.2, float("nan")]))
    assert bench.run().progress.best_step == 6


def test_checkpoints_come_every_so_many_steps() -> None:
    bench = Bench(policy=LoopPolicy(eval_every=None, checkpoint_every=2))
    bench.run()
    assert [step for step, *_ in bench.memory.saves] == [2, 4, 6, 8, 9]


def test_waiting_for_data_is_recorded() -> None:
    bench = Bench()
    bench.run()
    assert all(event["data_wait_seconds"] <= event["step_seconds"] for event in bench.of("step"))
