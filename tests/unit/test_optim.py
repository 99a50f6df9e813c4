"""Learning rates in optimizer steps, decay only where it belongs, optimizer state that survives the disk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.train.optim import (
    LearningRate,
    OptimizerSettings,
    decays,
    load_optimizer_tensors,
    make_optimizer,
    optimizer_tensors,
    warmup_steps,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.table = nn.Embedding(4, 3)


def test_biases_and_norms_do_not_decay() -> None:
    decay = decays(Net())
    assert [name for name, _ in Net().named_parameters() if decay(name)] == ["dense.weight", "table.weight"]


def test_linear_schedule_rises_over_warmup_and_falls_to_the_end() -> None:
    rate = LearningRate(peak=1.0, schedule="linear", warmup_steps=4, steps=104)
    assert [rate.at(step) for step in (1, 4)] == pytest.approx([0.2, 0.8])
    assert rate.at(5) == 1.0
    assert rate.at(55) == pytest.approx(0.5)
    assert rate.at(104) == pytest.approx(0.01)


def test_cosine_is_half_way_at_half_time() -> None:
    rate = LearningRate(peak=2.0, schedule="cosine", warmup_steps=0, steps=100)
    assert rate.at(51) == pytest.approx(1.0)
    assert 0 < rate.at(100) < 0.01


def test_constant_stays() -> None:
    assert LearningRate(3.0, "constant", 0, 10).at(10) == 3.0


@pytest.mark.parametrize(("warmup", "steps", "expected"), [(0.1, 100, 10), (25, 100, 25), (0, 9, 0), (500, 9, 9)])
def test_warmup_is_a_share_or_a_number_of_steps(warmup: float, steps: int, expected: int) -> None:
    assert warmup_steps(warmup, steps) == expected


def test_optimizer_state_put_back_gives_the_same_next_step() -> None:
    torch.manual_seed(0)
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.1)
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    makers = [make_optimizer(net.named_parameters(), decays(net), settings) for net in nets]
    gradients = [torch.randn_like(p) for p in nets[0].parameters()]

    def step(at: int) -> None:
        for parameter, gradient in zip(nets[at].parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        makers[at].step()

    step(0)
    step(0)
    nets[1].load_state_dict(nets[0].state_dict())
    saved = optimizer_tensors(makers[0], list(nets[0].named_parameters()))
    load_optimizer_tensors(makers[1], list(nets[1].named_parameters()), saved)
    step(0)
    step(1)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a, b)
