"""One device: the cut into micro-batches and the precision do not change what a step learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.errors import MachineError
from trimtab.parallel.strategy import OneDevice
from trimtab.train.optim import OptimizerSettings

DEVICE = torch.device("cpu")


class Squares:
    """Least squares on a small net: `batch` is (inputs [n, 6], targets [n])."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))

    def loss_sum(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return (self.module(inputs.to(next(self.module.parameters()).dtype)).float()[:, 0] - targets).square().sum()


def strategy_of(objective: Squares, precision: Any = "fp32", max_grad_norm: float = 0.0) -> OneDevice:
    return OneDevice(
        objective,
        device=DEVICE,
        precision=precision,
        settings=OptimizerSettings(learning_rate=0.01, weight_decay=0.01),
        max_grad_norm=max_grad_norm,
    )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 6, generator=generator), torch.randn(8, generator=generator)


def pieces(size: int) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = data()
    return list(zip(inputs.split(size), targets.split(size), strict=True))


def train(objective: Squares, strategy: OneDevice, size: int, steps: int = 4) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        parts = pieces(size)
        losses.append(strategy.run_group(parts, 8.0, range(len(parts))))
        assert strategy.apply(0.01).applied
    return losses


@pytest.mark.parametrize("size", [1, 3, 5, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16_weights"])
def test_micro_batch_size_does_not_change_the_losses(size: int, precision: str) -> None:
    whole, cut = Squares(), Squares()
    expected = train(whole, strategy_of(whole, precision), 8)
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert train(cut, strategy_of(cut, precision), size) == pytest.approx(expected, rel=tolerance)


def test_the_loss_is_the_sum_over_the_denominator() -> None:
    objective = Squares()
    expected = float(objective.loss_sum(data()).detach()) / 8
    assert strategy_of(objective).run_group(pieces(3), 8.0, range(3)) == pytest.approx(expected, rel=1e-6)


def test_clipping_bounds_the_step_and_reports_the_norm_before_it() -> None:
    objective = Squares()
    strategy = strategy_of(objective, max_grad_norm=1e-3)
    strategy.run_group(pieces(8), 0.01, [0])
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in objective.module.parameters() if p.grad is not None]))
    assert strategy.apply(0.01).grad_norm == pytest.approx(norm)
    assert norm > 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_weights", "fp16"])
def test_a_gradient_that_is_not_finite_changes_no_weight(precision: str) -> None:
    objective = Squares()
    strategy = strategy_of(objective, precision)
    before = [p.clone() for p in objective.module.parameters()]
    inputs, targets = data()
    targets[2] = float("nan")
    strategy.run_group([(inputs, targets)], 8.0, [0])
    outcome = strategy.apply(0.01)
    assert not outcome.applied
    assert all(torch.equal(a, b) for a, b in zip(before, objective.module.parameters(), strict=True))
    assert strategy.optimizer.state == {}


def test_loss_scale_falls_until_it_fits_and_is_kept_in_the_state() -> None:
    objective = Squares()
    strategy = strategy_of(objective, "fp16")
    inputs, targets = data()
    lowered = 0
    while True:
        strategy.run_group([(inputs, targets * 30)], 1.0, [0])
        outcome = strategy.apply(0.01)
        if outcome.applied:
            break
        assert outcome.scale_lowered
        lowered += 1
    assert lowered > 0
    assert strategy.scalars()["loss_scale"] == 2.0 ** (16 - lowered)
    other = strategy_of(Squares(), "fp16")
    other.load(strategy.tensors(), strategy.scalars())
    assert other.scalars() == strategy.scalars()


def test_a_loss_that_is_not_finite_leaves_the_loss_scale_alone() -> None:
    strategy = strategy_of(Squares(), "fp16")
    inputs, targets = data()
    loss = strategy.run_group([(inputs, targets * float("nan"))], 1.0, [0])
    before = strategy.scalars()
    outcome = strategy.apply(0.01, allowed=False)
    assert loss != loss and not outcome.applied and not outcome.scale_lowered
    assert strategy.scalars() == before


@pytest.mark.parametrize("precision", ["fp32", "bf16_weights", "bf16"])
def test_state_put_back_continues_bit_for_bit(precision: str) -> None:
    unbroken, first = Squares(), Squares()
    whole = strategy_of(unbroken, precision)
    train(unbroken, whole, 3, steps=4)
    part = strategy_of(first, precision)
    train(first, part, 3, steps=2)
    saved = {kind: {n: t.clone() for n, t in tensors.items()} for kind, tensors in part.tensors().items()}
    second = Squares(seed=9)
    resumed = strategy_of(second, precision)
    resumed.load(saved, part.scalars())
    train(second, resumed, 3, steps=2)
    for name, tensor in whole.tensors()["weights"].items():
        assert torch.equal(tensor, resumed.tensors()["weights"][name]), name


def test_bf16_weights_keep_a_float32_master_that_ends_in_the_module() -> None:
    objective = Squares()
    strategy = strategy_of(objective, "bf16_weights")
    train(objective, strategy, 8)
    assert all(p.dtype == torch.bfloat16 for p in objective.module.parameters())
    masters = strategy.tensors()["weights"]
    strategy.finish()
    for name, parameter in objective.module.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, masters[name])
    assert any((p != p.bfloat16().float()).any() for p in objective.module.parameters())


def test_tiny_updates_are_not_lost_in_bf16() -> None:
    objective = Squares()
    strategy = strategy_of(objective, "bf16_weights")
    before = {n: t.clone() for n, t in strategy.tensors()["weights"].items()}
    strategy.run_group(pieces(8), 8.0, [0])
    strategy.apply(1e-6)
    moved = [n for n, t in strategy.tensors()["weights"].items() if not torch.equal(t, before[n])]
    assert "0.weight" in moved


def test_bf16_weights_refuse_running_statistics() -> None:
    objective = Squares()
    objective.module = nn.Sequential(objective.module, nn.BatchNorm1d(1))
    with pytest.raises(MachineError, match=r"running statistics.*machine.precision: bf16"):
        strategy_of(objective, "bf16_weights")


def test_running_statistics_are_part_of_the_state() -> None:
    objective = Squares()
    objective.module = nn.Sequential(nn.BatchNorm1d(6), objective.module)
    strategy = strategy_of(objective)
    train(objective, strategy, 8, steps=1)
    assert "0.running_mean" in strategy.tensors()["weights"]


def statistics(objective: Squares) -> Tensor:
    module = objective.module
    assert isinstance(module, nn.Sequential) and isinstance(module[0], nn.BatchNorm1d)
    assert module[0].running_mean is not None
    return module[0].running_mean


def with_statistics() -> Squares:
    objective = Squares()
    objective.module = nn.Sequential(nn.BatchNorm1d(6), objective.module)
    return objective


def test_a_skipped_step_leaves_running_statistics_alone() -> None:
    objective = with_statistics()
    strategy = strategy_of(objective)
    inputs, targets = data()
    inputs[2] = float("nan")
    strategy.run_group([(inputs, targets)], 8.0, [0])
    assert statistics(objective).isnan().any()
    assert not strategy.apply(0.01).applied
    assert torch.equal(statistics(objective), torch.zeros(6))


def test_a_group_that_runs_again_counts_once_in_running_statistics() -> None:
    once, twice = with_statistics(), with_statistics()
    train(once, strategy_of(once), 8, steps=1)
    strategy = strategy_of(twice)
    strategy.run_group(pieces(8), 8.0, [0])
    strategy.free_memory()
    strategy.run_group(pieces(8), 8.0, [0])
    strategy.apply(0.01)
    assert torch.equal(statistics(once), statistics(twice))


def test_seeds_of_micro_batches_decide_dropout() -> None:
    objective = Squares()
    objective.module = nn.Sequential(nn.Dropout(0.5), objective.module)
    strategy = strategy_of(objective)
    losses = [strategy.run_group(pieces(4), 8.0, seeds) for seeds in ([1, 2], [1, 2], [3, 4])]
    assert losses[0] == losses[1] != losses[2]
