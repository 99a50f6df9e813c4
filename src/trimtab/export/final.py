"""The finished model: an ordinary transformers folder or peft adapter, written aside and renamed; and its reopening."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from trimtab.data.task import TaskSpec
from trimtab.errors import ModelError, RunError
from trimtab.export.model_card import CardFacts, model_card
from trimtab.models import adapters, load, source
from trimtab.models.facts import ModelFacts, read_facts, read_json

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Opened:
    """A finished model read back, in evaluation mode."""

    model: nn.Module
    tokenizer: load.LoadedTokenizer
    facts: ModelFacts
    """Of the folder, or of the adapter's base model."""
    is_adapter: bool


def save_final(model: nn.Module, tokenizer: Any, folder: Path, card: CardFacts, *, base_folder: Path) -> Path:
    """Writes the model into `folder` with tokenizer and model card, and returns `folder`.

    A model with adapters becomes a peft folder that names `base_folder`, and carries the config with the task's labels;
    any other an ordinary transformers folder. Everything is written and flushed in a folder beside it, which then takes
    the place of an older one; whatever happens, `folder` is never half a model.

    Raises:
        RunError: it cannot be written (no space, read-only).
    """
    aside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        try:
            _write(model, tokenizer, aside, card, base_folder)
            _flush(aside)
            _put_in_place(aside, folder)
            _remove_leftovers(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"The model could not be written to {folder}: {error}.",
            cure="Free some space or make the folder writable, then end the run with `trimtab resume`.",
        ) from error
    return folder


def _write(model: nn.Module, tokenizer: Any, folder: Path, card: CardFacts, base_folder: Path) -> None:
    if adapters.is_adapted(model):
        adapters.save_adapter(model, folder, base_model=str(base_folder))
        load.save_config(model, tokenizer, folder)
    else:
        load.save_model(model, tokenizer, folder)
    # After the model: peft writes a README.md of its own.
    (folder / "README.md").write_text(model_card(card), encoding="utf-8", newline="\n")


def _flush(folder: Path) -> None:
    """Has the disk hold every file before the folder gets its name."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())


def _put_in_place(aside: Path, folder: Path) -> None:
    """Renames; an older model moves out of the way first, and back if the rename fails."""
    if not folder.exists():
        aside.rename(folder)
        return
    old = folder.with_name(f".{folder.name}-old-{uuid.uuid4().hex[:8]}")
    folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """What earlier savings left that were killed on the way: each may be as large as the model."""
    name = re.compile(rf"\.{re.escape(folder.name)}-(old-)?[0-9a-f]{{8}}")
    for beside in folder.parent.iterdir():
        if name.fullmatch(beside.name) and beside.is_dir() and not beside.is_symlink():
            shutil.rmtree(beside, ignore_errors=True)


def open_final(
    folder: Path,
    spec: TaskSpec,
    *,
    cache_dir: Path,
    base_model: str | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> Opened:
    """The model that `save_final` wrote; an adapter is put on its base model.

    `base_model`: the job's `model.path`, for an adapter whose named base has moved (a GGUF file is converted anew).

    Raises:
        ModelError: a part is missing or damaged, or the adapter's base model is no longer where it was.
    """
    if not folder.is_dir():
        raise ModelError(f"There is no finished model at {folder}.", cure="Finish the run with `trimtab resume`.")
    tokenizer = load.load_tokenizer(folder, trust_remote_code=trust_remote_code)
    adapted = (folder / ADAPTER_CONFIG).is_file()
    base = folder
    if adapted:
        base = _base_folder(folder, base_model, cache_dir, trust_remote_code)
    facts = read_facts(base, trust_remote_code=trust_remote_code)
    loaded = load.load_model(base, facts, spec, dtype=dtype, pad_id=tokenizer.pad_id)
    if adapted:
        adapters.load_adapter(loaded.model, folder)
    elif loaded.new_weights:
        raise ModelError(
            f"{folder} lacks {len(loaded.new_weights)} weights of its head, such as '{loaded.new_weights[0]}'.",
            cure="Train again, or take the folder of a finished run.",
        )
    loaded.model.eval()
    return Opened(model=loaded.model, tokenizer=tokenizer, facts=facts, is_adapter=adapted)


def _base_folder(folder: Path, base_model: str | None, cache_dir: Path, trust_remote_code: bool) -> Path:
    named = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelError(f"{folder / ADAPTER_CONFIG} names no base model.", cure="Add `base_model_name_or_path`.")
    if base_model is not None and not Path(named).is_dir():
        named = base_model
    try:
        return source.resolve(named, cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    except ModelError as error:
        raise ModelError(
            f"The adapter in {folder} needs its base model: {error.message}",
            cure=f"Put the model back, or correct `base_model_name_or_path` in {folder / ADAPTER_CONFIG}.",
        ) from error
