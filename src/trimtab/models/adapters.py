"""Which weights train: all, LoRA adapters, or the top of the model. The only import of peft."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trimtab.data.task import LANGUAGE_KINDS, TaskSpec
from trimtab.errors import JobError, ModelError, did_you_mean
from trimtab.job import MethodSection
from trimtab.models import blocks
from trimtab.models.weight_files import read_header
from trimtab.units import format_count

DEFAULT_LAST_LAYERS = 2
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_NAME = "default"

_KEYS_OF_KIND = {
    "full": frozenset({"freeze_embeddings"}),
    "lora": frozenset({"rank", "alpha", "dropout", "target_modules"}),
    "last_layers": frozenset({"last_layers"}),
}
_SAVED_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Applied:
    """A model of which the method's weights, and only these, require gradients."""

    model: nn.Module
    """The same transformers model, changed in place; with LoRA its linear layers hold the adapters."""
    trainable_parameters: int
    total_parameters: int
    description: str
    """One sentence for the user."""
    warnings: tuple[str, ...] = ()


def apply_method(
    model: nn.Module, method: MethodSection, spec: TaskSpec, *, seed: int, new_weights: Collection[str] = ()
) -> Applied:
    """Makes the method's weights trainable and freezes the others.

    Args:
        seed: fixes the adapters, whatever was drawn before.
        new_weights: parameters that the folder does not have (`Loaded.new_weights`); they train in every method.

    Raises:
        JobError: a setting that this method would ignore; more layers than the model has.
        ModelError: target modules that the model does not have; nothing left to train.
    """
    _refuse_ignored(method)
    cautions: list[str] = []
    if method.kind == "lora":
        said = _apply_lora(model, method, spec, seed, new_weights)
    elif method.kind == "last_layers":
        said = _apply_last_layers(model, method, new_weights, cautions)
    else:
        said = _apply_full(model, method, cautions)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    if not trainable:
        raise ModelError("The method leaves no weight to train.", cure="Use `method.kind: full`.")
    share = f"{format_count(trainable)} of {format_count(total)} parameters train ({trainable / total:.2%})"
    return Applied(model, trainable, total, f"{said}: {share}.", tuple(cautions))


def _refuse_ignored(method: MethodSection) -> None:
    """A setting that the job made and that this method does not read is an error, never passed over."""
    useful = _KEYS_OF_KIND[method.kind]
    for name in sorted(method.model_fields_set - useful - {"kind"}):
        value = getattr(method, name)
        if value is None or value is False:
            continue
        owner = next(kind for kind, names in _KEYS_OF_KIND.items() if name in names)
        raise JobError(
            f"`method.{name}: {value}` has no effect with `method.kind: {method.kind}`.",
            cure=f"Remove `method.{name}`, or set `method.kind: {owner}`.",
        )


def _apply_full(model: nn.Module, method: MethodSection, cautions: list[str]) -> str:
    model.requires_grad_(True)
    if not method.freeze_embeddings:
        return "All weights"
    frozen = {id(table.weight): table.weight for _, table in blocks.embeddings(model)}
    for weight in frozen.values():
        weight.requires_grad_(False)
    if blocks.is_head_tied(model):
        cautions.append("The output layer is the table of the embeddings, so it stays as it is too.")
    return f"All weights but {format_count(sum(w.numel() for w in frozen.values()))} of the embeddings"


def _apply_last_layers(
    model: nn.Module, method: MethodSection, new_weights: Collection[str], cautions: list[str]
) -> str:
    _, layers = blocks.block_list(model)
    wanted = min(DEFAULT_LAST_LAYERS, len(layers)) if method.last_layers is None else method.last_layers
    if wanted > len(layers):
        raise JobError(
            f"`method.last_layers: {wanted}` is more than the {len(layers)} layers of the model.",
            cure=f"Set `method.last_layers` to {len(layers)} or less, or use `method.kind: full`.",
        )
    tied = blocks.is_head_tied(model)
    if wanted == 0 and tied:
        raise JobError(
            "`method.last_layers: 0` leaves nothing to train: the output layer of this model is its embedding table.",
            cure=f"Set `method.last_layers: {DEFAULT_LAST_LAYERS}`.",
        )
    model.requires_grad_(False)
    behind = blocks.after_blocks(model).items()
    parts = [*list(layers)[len(layers) - wanted :]]
    # A pooler belongs to the head of a classifier; a norm belongs to the layers.
    parts += [module for name, module in behind if wanted or name.endswith("pooler")]
    if tied:
        cautions.append("The output layer is the table of the embeddings; it stays as it is.")
    else:
        parts += [model.get_submodule(name) for name in blocks.head_names(model)]
    for part in parts:
        part.requires_grad_(True)
    _unfreeze(model, new_weights)
    head = "the final norm" if tied else "the head"
    return f"The last {wanted} of {len(layers)} layers and {head}" if wanted else "The head alone"


def _unfreeze(model: nn.Module, names: Collection[str]) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(True)


def _apply_lora(
    model: nn.Module, method: MethodSection, spec: TaskSpec, seed: int, new_weights: Collection[str]
) -> str:
    import peft

    targets = _targets(model, method)
    alpha = 2.0 * method.rank if method.alpha is None else method.alpha
    config = peft.LoraConfig(
        r=method.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
        lora_dropout=method.dropout,
        target_modules=list(targets),
        modules_to_save=list(_modules_to_save(model, spec, new_weights)) or None,
        bias="none",
        task_type=_task_type(spec),
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    with torch.random.fork_rng(devices=[]), _without_notices():
        torch.manual_seed(seed)
        # The wrapper itself is not needed: it changes `model` in place, and training runs without its indirections.
        peft.get_peft_model(model, config, adapter_name=ADAPTER_NAME)  # type: ignore[arg-type]
    _train_in_float32(model)
    adapted = sorted({name.rpartition(".")[2] for name in targets})
    count = sum(1 for name, _ in model.named_parameters() if name.endswith(f"lora_A.{ADAPTER_NAME}.weight"))
    return f"LoRA of rank {method.rank}, alpha {alpha:g}, on {count} linear layers ({', '.join(adapted)})"


@contextmanager
def _without_notices() -> Generator[None]:
    """peft uses names that transformers has since renamed; the notice is for its authors, not for the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _train_in_float32(model: nn.Module) -> None:
    """peft makes adapters float32, but copies a head in the type of its base, in which small steps would be lost."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.float()


def _targets(model: nn.Module, method: MethodSection) -> tuple[str, ...]:
    """Names that peft matches at the end of module names: every one lies in the blocks unless the job names others."""
    linear = blocks.linear_names(model)
    if method.target_modules is None or method.target_modules == "all_linear":
        return _within_block(model, linear)
    every = [name for name, module in model.named_modules() if blocks.is_linear(module)]
    head = tuple(f"{name}." for name in blocks.head_names(model))
    for target in method.target_modules:
        matched = [name for name in every if name == target or name.endswith(f".{target}")]
        if not matched:
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ModelError(
                f"The model has no linear layer '{target}' for `method.target_modules`. {did_you_mean(target, known)}",
                cure="Name layers of the model, or leave `method.target_modules` out for all linear layers.",
            )
        if any(f"{name}.".startswith(head) for name in matched):
            raise ModelError(
                f"`method.target_modules` names '{target}', which is the head; the head of a task trains in full.",
                cure=f"Remove '{target}' from `method.target_modules`.",
            )
    return tuple(method.target_modules)


def _within_block(model: nn.Module, linear: tuple[str, ...]) -> tuple[str, ...]:
    """Names relative to a block (`attention.self.query`) where these match nothing else, full names otherwise."""
    if not linear:
        raise ModelError(
            "The model's blocks have no linear layer, so LoRA has nothing to adapt.", cure="Use `method.kind: full`."
        )
    prefix = blocks.block_list(model)[0]
    short = tuple(dict.fromkeys(name[len(prefix) + 1 :].split(".", 1)[1] for name in linear))
    endings = tuple(f".{name}" for name in short)
    matched = {name for name, module in model.named_modules() if blocks.is_linear(module) and name.endswith(endings)}
    return short if matched == set(linear) else linear


def _modules_to_save(model: nn.Module, spec: TaskSpec, new_weights: Collection[str]) -> tuple[str, ...]:
    """The head of a task, and other modules whose weights are new (a pooler that the checkpoint lacks)."""
    names = [] if spec.kind in LANGUAGE_KINDS else list(blocks.head_names(model))
    for weight in new_weights:
        module = weight.rpartition(".")[0]
        if not any(module == name or module.startswith(f"{name}.") for name in names):
            names.append(module)
    return tuple(dict.fromkeys(names))


def _task_type(spec: TaskSpec) -> str:
    if spec.kind in LANGUAGE_KINDS:
        return "CAUSAL_LM"
    return "TOKEN_CLS" if spec.kind == "token_classification" else "SEQ_CLS"


def is_adapted(model: nn.Module) -> bool:
    """Whether `apply_method` or `load_adapter` put adapters into this model."""
    return "peft_config" in vars(model)


def save_adapter(model: nn.Module, folder: Path, *, base_model: str) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which `peft.PeftModel.from_pretrained` reads.

    `base_model`: what the config names as the model to load first, a folder or hub id.
    """
    import peft

    config: Any = model.peft_config[ADAPTER_NAME]  # type: ignore[index]
    state = peft.get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    tensors = {f"{_SAVED_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    before = config.base_model_name_or_path, config.inference_mode
    config.base_model_name_or_path, config.inference_mode = base_model, True
    try:
        save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
        config.save_pretrained(folder)
    finally:
        config.base_model_name_or_path, config.inference_mode = before


def load_adapter(model: nn.Module, folder: Path, *, trainable: bool = False) -> nn.Module:
    """Puts the adapter of `folder` into a freshly loaded base model, in place, and returns that model.

    Raises:
        ModelError: no adapter in the folder, a damaged or pickled one, or one that does not fit the model.
    """
    import peft

    path = folder / ADAPTER_FILE
    if not path.is_file() or not (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds no adapter: adapter_config.json and {ADAPTER_FILE} are needed.",
            cure="Give the `model` folder of a finished LoRA run.",
        )
    read_header(path)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        config.inference_mode = not trainable
        config.base_model_name_or_path = None  # else peft warns that the base has moved
        with _without_notices():
            peft.get_peft_model(model, config, adapter_name=ADAPTER_NAME)  # type: ignore[arg-type]
        tensors = {name.removeprefix(_SAVED_PREFIX): tensor for name, tensor in load_file(path).items()}
        expected = set(peft.get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME, save_embedding_layers=False))
        if expected != tensors.keys():
            odd = sorted(expected ^ tensors.keys())
            raise ModelError(
                f"The adapter in {folder} does not fit the model: {len(odd)} names differ, such as '{odd[0]}'.",
                cure="Load it on the base model that its adapter_config.json names.",
            )
        peft.set_peft_model_state_dict(model, tensors, adapter_name=ADAPTER_NAME)
    except (ValueError, RuntimeError, TypeError, KeyError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"The adapter in {folder} cannot be loaded: {first}.",
            cure="Load it on the base model that its adapter_config.json names.",
        ) from error
    return model
