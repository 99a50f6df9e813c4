"""The parts of a transformer told by its structure, not by its class name: blocks, backbone, head, embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from trimtab.errors import ModelError


def block_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's blocks: the longest list of modules of one class.

    Raises:
        ModelError: no such list.
    """
    found: tuple[str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            deeper = found is not None and name.startswith(f"{found[0]}.")
            if found is None or (len(module) > len(found[1]) and not deeper):
                found = name, module
    if found is None:
        raise ModelError(
            f"{type(model).__name__} has no list of equal blocks, so its layers cannot be told apart.",
            cure="Use `method.kind: full`.",
        )
    return found


def backbone_name(model: nn.Module) -> str:
    """Name of the direct child that holds the blocks (`bert`, `model`, `transformer`)."""
    return block_list(model)[0].split(".")[0]


def head_names(model: nn.Module) -> tuple[str, ...]:
    """The direct children beside the backbone that have parameters: classifier, score, lm_head, pre_classifier ..."""
    backbone = backbone_name(model)
    return tuple(
        name for name, child in model.named_children() if name != backbone and any(True for _ in child.parameters())
    )


def after_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of the backbone that work on the output of the last block: final norm and pooler, by name."""
    path = block_list(model)[0].split(".")
    found: dict[str, nn.Module] = {}
    parent: nn.Module = model
    for depth, part in enumerate(path[:-1]):
        parent = parent.get_submodule(part)
        holder = path[depth + 1]
        names = [name for name, _ in parent.named_children()]
        for name, child in parent.named_children():
            is_behind = names.index(name) > names.index(holder) or name == "pooler"
            if name != holder and is_behind and _is_norm_or_pooler(name, child):
                found[".".join([*path[: depth + 1], name])] = child
    return found


def _is_norm_or_pooler(name: str, module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return "norm" in kind or name == "pooler" or "norm" in name.lower() or name == "ln_f"


def embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    """Tables of tokens, positions and segments, outside the blocks."""
    blocks = block_list(model)[0]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not name.startswith(f"{blocks}."):
            yield name, module


def linear_names(model: nn.Module) -> tuple[str, ...]:
    """Full names of the linear layers inside the blocks; routers of experts are left out."""
    blocks = block_list(model)[0]
    return tuple(
        name
        for name, module in model.named_modules()
        if name.startswith(f"{blocks}.") and is_linear(module) and name.rpartition(".")[2] not in ("gate", "router")
    )


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or GPT-2's transposed twin of it."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_head_tied(model: nn.Module) -> bool:
    """Whether the output layer of a language model is the table of its input embeddings."""
    tables = {id(table.weight) for _, table in embeddings(model)}
    return any(id(p) in tables for name in head_names(model) for p in model.get_submodule(name).parameters())
