"""Anyone's own module: a small vision transformer on scikit-learn's digits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trimtab import Trainer
from trimtab.errors import Interrupted, JobError, RunError
from trimtab.events import steps_of


class Digits:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; `noise` adds random augmentation."""

    def __init__(self, part: slice, noise: float = 0.0) -> None:
        bunch = load_digits()
        self.images = torch.tensor(bunch.images[part], dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(bunch.target[part])
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return image + self.noise * torch.randn_like(image), self.labels[index]


def vision_transformer(layers: int = 2) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_labels=10,
        )
    )


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(module(images).logits, labels, reduction="none")


def measure(module: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    return {"accuracy": (module(images).logits.argmax(-1) == labels).float()}


def trainer(output: Path, part: slice = slice(0, 64), noise: float = 0.0, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {"batch_size": 16, "epochs": 2, "learning_rate": 3e-3, "threads": 1}
    return Trainer(
        vision_transformer(), Digits(part, noise), loss, measure=measure, output=output, **(defaults | settings)
    )


def test_a_small_vision_transformer_learns_the_digits(tmp_path: Path) -> None:
    work = trainer(
        tmp_path / "run",
        slice(0, 1400),
        eval_dataset=Digits(slice(1400, None)),
        best_metric="accuracy",
        batch_size=64,
        epochs=12,
    )
    run = work.train()
    assert run.metrics["accuracy"] > 0.8
    saved = load_file(run.model_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in work.module.state_dict().items())


def losses(run: Any) -> list[float]:
    return [event["loss"] for event in steps_of(run.events())]


def test_micro_batches_do_not_change_the_losses(tmp_path: Path) -> None:
    whole = losses(trainer(tmp_path / "all").train())
    assert losses(trainer(tmp_path / "cut", micro_batch=5).train()) == pytest.approx(whole, rel=1e-5)


def test_a_resumed_run_with_random_augmentation_ends_the_same(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", noise=0.3)
    expected = losses(whole.train())

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        trainer(tmp_path / "cut", noise=0.3).train(listener=stop)
    again = trainer(tmp_path / "cut", noise=0.3)
    assert losses(again.train(resume=True)) == expected
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, again.module.state_dict()[name]), name


def test_a_loss_that_is_already_a_mean_is_refused(tmp_path: Path) -> None:
    work = Trainer(
        vision_transformer(),
        Digits(slice(0, 20)),
        lambda module, batch: loss(module, batch).mean(),
        output=tmp_path / "run",
        threads=1,
    )
    with pytest.raises(JobError, match=r"returned \(\) for \d+ examples.*reduction='none'"):
        work.train()


def test_an_unknown_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"no setting lr.*learning_rate"):
        Trainer(vision_transformer(), Digits(slice(0, 9)), loss, lr=1e-3)


def test_an_existing_run_is_left_alone(tmp_path: Path) -> None:
    trainer(tmp_path / "run", slice(0, 16), epochs=1).train()
    with pytest.raises(RunError, match="already holds a run"):
        trainer(tmp_path / "run").train()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"schedule": "linera"}, r"training\.schedule: 'linera' is not one of linear.*Did you mean 'linear'"),
        ({"batch_size": 0}, r"training\.batch_size: 0 is below 1"),
        ({"precision": "fp8"}, r"machine\.precision: 'fp8' is not"),
        ({"learning_rate": float("nan")}, r"learning_rate"),
        ({"workers": -1}, r"workers is -1"),
    ],
)
def test_settings_keep_the_job_files_rules(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Trainer(vision_transformer(), Digits(slice(0, 9)), loss, **setting)


def test_frozen_weights_come_back_as_they_were_after_bf16(tmp_path: Path) -> None:
    work = trainer(tmp_path / "run", slice(0, 32), precision="bf16_weights", epochs=1)
    work._objective._loss = lambda module, batch: loss(module, (batch[0].bfloat16(), batch[1]))
    first = next(iter(work.module.parameters()))
    first.requires_grad_(False)
    before = first.detach().clone()
    run = work.train()
    assert {parameter.dtype for parameter in work.module.parameters()} == {torch.float32}
    assert torch.equal(first, before)
    name = next(name for name, _ in work.module.named_parameters())
    assert torch.equal(load_file(run.model_path / "model.safetensors")[name], before)


def test_a_run_resumed_after_its_last_step_has_its_metrics(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "run", eval_dataset=Digits(slice(64, 96))).train()
    whole.set_status("training")  # as a kill while the model is written leaves it
    again = trainer(tmp_path / "run", eval_dataset=Digits(slice(64, 96))).train(resume=True)
    done = [event["metrics"] for event in again.events() if event["kind"] == "done"]
    assert len(done) == 2 and done[0] == done[1] and again.status == "done"
