"""The job file: what is learned, how it is computed, where it goes. Strict, and explained field by field.

`model`, `data`, `task`, `method` and `training` say what is learned and belong to the user. `machine` says how it is
computed and is left to the planner unless set; nothing in it may change what is learned. `output` says where it goes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

TaskKind = Literal[
    "classification",
    "multilabel_classification",
    "regression",
    "token_classification",
    "language_modelling",
    "instruction",
]
MethodKind = Literal["full", "lora", "last_layers"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "bf16_weights"]
Schedule = Literal["linear", "cosine", "constant"]


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("is blank")
    return value


Text = Annotated[str, AfterValidator(_not_blank)]


class Section(BaseModel):
    """A group of keys. Strict types: a number written as text is an error, never a guess."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class ModelSection(Section):
    """Where the model comes from."""

    path: Text = Field(
        description="Folder of a transformers model, a .gguf file, or a hub id such as Qwen/Qwen2.5-0.5B."
    )
    dropout: float | None = Field(
        default=None, ge=0, lt=1, description="Dropout everywhere in the model. Left out: what the model's config says."
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that lies in the model's folder. Only for code that you have read."
    )


class DataSection(Section):
    """What to learn from."""

    train: Text | list[Text] = Field(
        description="A file, a folder, several of them, or a hub data set. "
        "CSV, TSV, JSON, JSON lines, Parquet, Arrow, text."
    )
    eval: Text | list[Text] | None = Field(
        default=None, description="Held-out data. Left out: split off by `eval_fraction`."
    )
    eval_fraction: float = Field(
        default=0.1,
        ge=0,
        le=0.9,
        description="Share of `train` held out when `eval` is not given: seeded and stratified. 0: none.",
    )
    group_by: Text | None = Field(
        default=None, description="Column whose equal values stay on one side of the split, so that nothing leaks."
    )
    text: Text | list[Text] | None = Field(
        default=None, description="Column with the text, or two columns for a pair. Left out: found by its name."
    )
    label: Text | list[Text] | None = Field(
        default=None,
        description="Column with the label, or several 0/1 columns for many labels at once. Left out: found by name.",
    )
    encoding: Text = Field(
        default="utf-8", description="Encoding of text files, for instance gbk or latin-1. A BOM is accepted."
    )
    template: Text | None = Field(
        default=None,
        description="Chat template: `chatml`, `alpaca`, `plain`, or a Jinja file. Left out: the tokenizer's own.",
    )
    answer_marker: Text | None = Field(
        default=None,
        description="For plain text: train only on what follows this marker, for instance '### Response:'.",
    )


class TaskSection(Section):
    """What the model shall do."""

    kind: TaskKind | None = Field(default=None, description="Left out: inferred from data and model when it is plain.")
    loss_on: Literal["answers", "all"] = Field(
        default="answers", description="Instruction tuning: which tokens count in the loss."
    )
    class_weights: Literal["balanced"] | list[float] | None = Field(
        default=None,
        description="Weight of each class in the loss, in the order of the label names; `balanced`: inverse frequency.",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the target spread evenly over all classes."
    )


class MethodSection(Section):
    """Which weights train."""

    kind: MethodKind = Field(
        default="full", description="`full`: all weights; `lora`: adapters; `last_layers`: the top of the model."
    )
    rank: int = Field(default=16, ge=1, le=1024, description="LoRA: rank of the adapters.")
    alpha: float | None = Field(
        default=None, gt=0, description="LoRA: scale is alpha / rank. Left out: twice the rank."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="LoRA: dropout before the adapter.")
    target_modules: Literal["all_linear"] | list[Text] | None = Field(
        default=None, description="LoRA: modules that get adapters. Left out: all linear layers of the model's blocks."
    )
    last_layers: int | None = Field(
        default=None,
        ge=0,
        description="last_layers: how many top layers train beside the head. 0: the head alone. Left out: 2.",
    )
    freeze_embeddings: bool = Field(default=False, description="full: keep the embeddings as they are.")


class TrainingSection(Section):
    """How it learns. Counted in examples and optimizer steps, never in micro-batches."""

    batch_size: int = Field(default=16, ge=1, description="Examples per optimizer step, over all cards.")
    epochs: float = Field(
        default=3.0, gt=0, le=10_000, description="Passes over the training data. A part of one is allowed."
    )
    max_steps: int | None = Field(
        default=None, ge=1, description="Stop after this many optimizer steps, whatever `epochs` says."
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="Peak learning rate. Left out: 5e-5 for full, 2e-4 for lora, 1e-3 for the head alone.",
    )
    schedule: Schedule = Field(default="linear", description="How the learning rate falls after warm-up.")
    warmup: float = Field(
        default=0.06, ge=0, description="Warm-up: below 1 a share of all steps, from 1 on a number of optimizer steps."
    )
    weight_decay: float = Field(default=0.01, ge=0, le=10, description="AdamW weight decay; never on biases and norms.")
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Gradients are clipped to this norm, after unscaling. 0: no clipping."
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Longest example in tokens; the rest is cut. Left out: what the model allows, up to 512 or 2048.",
    )
    group_by_length: bool = Field(
        default=False, description="Steps of examples of similar length: faster where examples are padded, less random."
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="Fixes order, split, dropout and new weights.")
    eval_every: int | None = Field(
        default=None, ge=1, description="Evaluate every so many steps. Left out: after each epoch."
    )
    early_stopping: int | None = Field(
        default=None, ge=1, description="Stop after so many evaluations without a better metric. Left out: never."
    )
    best_metric: Text | None = Field(
        default=None,
        description="Metric that picks the best checkpoint, for instance accuracy or loss. Left out: the task's own.",
    )


class MachineSection(Section):
    """How it is computed. Everything left out is decided by measuring; none of it changes what is learned."""

    device: Literal["auto", "cpu", "cuda"] | Annotated[str, Field(pattern=r"^cuda:\d+$")] = Field(
        default="auto", description="`auto`, `cpu`, `cuda` or `cuda:1`."
    )
    precision: Precision | Literal["auto"] = Field(
        default="auto", description="Type of the arithmetic. Trained weights keep an fp32 master in every one of them."
    )
    micro_batch: int | None = Field(
        default=None, ge=1, description="Most examples in one forward and backward. Left out: by a budget of positions."
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads. Left out: measured at the start.")


class OutputSection(Section):
    """Where it goes."""

    run: Text | None = Field(default=None, description="Folder of the Run. Left out: runs/<model>-<data>-<number>.")
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="Save every so many steps. Left out: at each evaluation and at least every 10 minutes.",
    )
    keep: int = Field(default=2, ge=2, description="How many checkpoints stay on the disk beside the best one.")


class Job(Section):
    """One piece of work, as the job file says it."""

    model: ModelSection
    data: DataSection
    task: TaskSection = TaskSection()
    method: MethodSection = MethodSection()
    training: TrainingSection = TrainingSection()
    machine: MachineSection = MachineSection()
    output: OutputSection = OutputSection()


def job_schema() -> dict[str, object]:
    """The JSON schema of the job file, for editors."""
    return Job.model_json_schema()


def known_keys() -> dict[str, str]:
    """Every dotted key with its explanation, in the order of the job file."""
    keys: dict[str, str] = {}
    for section_name, section in Job.model_fields.items():
        model = section.annotation
        assert isinstance(model, type) and issubclass(model, Section)
        for name, field in model.model_fields.items():
            keys[f"{section_name}.{name}"] = field.description or ""
    return keys
