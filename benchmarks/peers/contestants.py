"""Who is compared: each peer in its default and in its best documented form, and Trimtab."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BOTH = ("classification", "instruction")
ENCODER = ("classification",)
DECODER = ("instruction",)

Role = Literal["trimtab", "default", "tuned"]


@dataclass(frozen=True)
class Contestant:
    """One way to run a workload."""

    name: str
    environment: str
    """A name of `environments.ENVIRONMENTS`, or `trimtab` for the interpreter that runs the benchmark."""
    script: str
    kinds: tuple[str, ...]
    role: Role
    precision: str = "fp32"
    order: Literal["random", "grouped"] = "random"
    options: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """What its script is told."""
        told = ["--precision", self.precision, "--order", self.order]
        return told + [word for option in self.options for word in ("--option", option)]


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("trimtab", "trimtab", "trimtab_job.py", BOTH, "trimtab", "auto"),
        Contestant("trimtab-grouped", "trimtab", "trimtab_job.py", BOTH, "trimtab", "auto", "grouped"),
        Contestant("trimtab-fp32", "trimtab", "trimtab_job.py", BOTH, "trimtab", "fp32"),
        Contestant("trainer-fp32", "hf", "trainer.py", BOTH, "default"),
        Contestant("trainer-bf16", "hf", "trainer.py", BOTH, "default", "bf16"),
        Contestant("trainer-bf16-grouped", "hf", "trainer.py", BOTH, "tuned", "bf16", "grouped"),
        Contestant("accelerate-bf16-grouped", "hf", "accelerate_loop.py", ENCODER, "tuned", "bf16", "grouped"),
        Contestant("lightning-bf16-grouped", "hf", "lightning_loop.py", ENCODER, "tuned", "bf16", "grouped"),
        Contestant("trl", "hf", "trl_sft.py", DECODER, "default", "bf16"),
        Contestant("trl-padding-free", "hf", "trl_sft.py", DECODER, "tuned", "bf16", options=("padding_free",)),
        Contestant("trl-packed", "hf", "trl_sft.py", DECODER, "tuned", "bf16", options=("packed",)),
        Contestant("litgpt", "litgpt", "litgpt_sft.py", DECODER, "default"),
        Contestant("litgpt-bf16-true", "litgpt", "litgpt_sft.py", DECODER, "tuned", "bf16"),
        Contestant("llamafactory", "llamafactory", "llamafactory_sft.py", DECODER, "default"),
        Contestant("llamafactory-packed", "llamafactory", "llamafactory_sft.py", DECODER, "tuned", "bf16",
                   options=("packed",)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """A ratio that issue 2 asks for: Trimtab's figure against that of one peer, or of the best of several."""

    kind: str
    trimtab: str
    against: tuple[str, ...]
    figure: Literal["tokens_per_cpu_second", "peak_rss_bytes"]
    wanted: float
    says: str

    @property
    def higher_is_better(self) -> bool:
        return self.figure == "tokens_per_cpu_second"


_SPEED = "tokens_per_cpu_second"
_ENCODER_TUNED = ("trainer-bf16-grouped", "accelerate-bf16-grouped", "lightning-bf16-grouped")
_DECODER_TUNED = (
    "trainer-bf16-grouped", "trl-padding-free", "trl-packed", "litgpt", "litgpt-bf16-true", "llamafactory-packed",
)  # fmt: skip
GOALS = (
    Goal("classification", "trimtab", ("trainer-bf16",), _SPEED, 3.0, "Trainer in bf16 by default"),
    Goal("classification", "trimtab", ("trainer-fp32",), _SPEED, 4.5, "Trainer in fp32 by default"),
    Goal("classification", "trimtab", _ENCODER_TUNED, _SPEED, 1.1, "the best tuned peer, which sorts its data"),
    Goal("classification", "trimtab-grouped", _ENCODER_TUNED, _SPEED, 1.5, "the best tuned peer on sorted batches"),
    Goal("instruction", "trimtab", ("trainer-bf16",), _SPEED, 4.0, "Trainer in bf16 by default"),
    Goal("instruction", "trimtab-grouped", _DECODER_TUNED, _SPEED, 1.7, "the best tuned peer"),
    Goal("instruction", "trimtab", ("trainer-bf16",), "peak_rss_bytes", 0.45, "Trainer's peak memory, bf16"),
)
