"""Proves, before the first step, that a model gives the same in the flat layout as in its own padded forward.

A few short random examples run both ways, without dropout and without a graph. Whatever the flat kernels do not know
(position biases, state-space layers, masks of a model's own) shows as a difference and the padded layout is used. That
covers every architecture by behaviour instead of a list of names.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.data.batches import Batch, Layout
from trimtab.data.task import LANGUAGE_KINDS, WHOLE_TEXT_KINDS
from trimtab.job import TaskKind
from trimtab.kernels.cross_entropy import HeadScaling
from trimtab.kernels.interface import FlatUnsupported, supports_flat
from trimtab.models.packed import Parts, Pooling, TextModel

_LENGTHS = (11, 3, 7)
"""Unequal, and short: the check must cost less than a step."""
_KNOWN_LAYERS = ("full_attention", "sliding_attention")
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}
_COARSE_TOLERANCE = 3e-2
"""For 16-bit weights or arithmetic."""


@dataclass(frozen=True)
class Chosen:
    """How a model will run, and why."""

    runner: TextModel
    scaling: HeadScaling | None
    """Language tasks: logits are the head's linear output under this scaling; None: the model's own head must run."""
    reason: str
    """One sentence for the user."""


@dataclass(frozen=True)
class _Truth:
    """What the model's own padded forward gives on the sample."""

    logits: Tensor
    """[E, classes] or, at the real tokens of the examples in order, [tokens, classes]."""
    hidden: Tensor | None
    """[tokens, H], for language tasks."""


def choose_layout(
    parts: Parts,
    kind: TaskKind,
    layout: Layout,
    *,
    pad_id: int,
    longest: int | None = None,
) -> Chosen:
    """The runner for a model: flat when that was asked for and the check passes, else padded, with the reason.

    `longest`: tokens of the longest example that will come, so that an attention window longer than any example does
    not count against a model; None: unknown.
    """
    with _quiet(parts.outer):
        truth = _truth(parts, kind, pad_id)
        scaling = _find_scaling(parts, truth) if kind in LANGUAGE_KINDS else None
        if layout == "flat":
            try:
                runner = _find_flat(parts, kind, truth, pad_id=pad_id, longest=longest)
            except FlatUnsupported as finding:
                reason = f"Examples are padded: {finding}."
            else:
                return Chosen(runner, scaling, "Examples are laid end to end without padding (checked on this model).")
        else:
            reason = "Examples are padded, as asked for."
        return Chosen(_find_padded(parts, kind, truth, pad_id), scaling, reason)


def _find_flat(parts: Parts, kind: TaskKind, truth: _Truth, *, pad_id: int, longest: int | None) -> TextModel:
    """The first flat runner whose outputs agree. Raises FlatUnsupported with the reason when none does."""
    weight = next(parts.outer.parameters())
    device = weight.device.type
    kind_of_float = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if not supports_flat(weight.device, kind_of_float):
        raise FlatUnsupported("this device has no kernel for attention without padding")
    _refuse_unknown_layers(parts.config)
    poolings: tuple[Pooling, ...] = ("first", "last", "mean") if kind in WHOLE_TEXT_KINDS else ("own",)
    finding = FlatUnsupported("the model's outputs differ without padding")
    for offset in _position_offsets(parts):
        for pooling in poolings:
            if pooling == "last" and parts.head is None:
                continue
            runner = TextModel(parts, kind, "flat", pooling=pooling, position_offset=offset)
            try:
                agrees = _agrees(runner, parts, kind, truth, pad_id)
                _refuse_unseen_window(parts.config, runner.windows, longest)
            except (FlatUnsupported, IndexError, RuntimeError, TypeError, ValueError) as error:
                runner.close()
                finding = error if isinstance(error, FlatUnsupported) else FlatUnsupported(f"it fails flat ({error})")
                continue
            if agrees:
                runner.forget()
                return runner
            runner.close()
    raise finding


def _find_padded(parts: Parts, kind: TaskKind, truth: _Truth, pad_id: int) -> TextModel:
    """The padded runner. A head on the last token is read by us where that agrees, so that a pad token inside a text,
    or an end-of-text token that doubles as padding, is not mistaken for the end."""
    if kind in WHOLE_TEXT_KINDS and parts.head is not None:
        runner = TextModel(parts, kind, "padded", pooling="last")
        if _agrees(runner, parts, kind, truth, pad_id):
            return runner
        runner.close()
    return TextModel(parts, kind, "padded")


def _agrees(runner: TextModel, parts: Parts, kind: TaskKind, truth: _Truth, pad_id: int) -> bool:
    batch = _sample(parts, kind, runner.layout, pad_id)
    if truth.hidden is not None:
        return _close(runner.hidden(batch), truth.hidden)
    return _close(runner.logits(batch), truth.logits)


def _truth(parts: Parts, kind: TaskKind, pad_id: int) -> _Truth:
    batch = _sample(parts, kind, "padded", pad_id)
    assert batch.attention_mask is not None
    real = batch.attention_mask.flatten().bool()

    def run(module: nn.Module) -> Any:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if parts.takes(module, "use_cache"):
            inputs["use_cache"] = False
        return module(**inputs)

    logits = run(parts.outer).logits
    if kind in WHOLE_TEXT_KINDS:
        return _Truth(logits, None)
    hidden = run(parts.backbone).last_hidden_state.flatten(0, 1)[real] if kind in LANGUAGE_KINDS else None
    return _Truth(logits.flatten(0, 1)[real], hidden)


def _find_scaling(parts: Parts, truth: _Truth) -> HeadScaling | None:
    """How the model's logits follow from its head's linear output: as they are, times a factor, or soft-capped."""
    if not isinstance(parts.head, nn.Linear) or truth.hidden is None:
        return None
    linear = parts.head(truth.hidden).float()
    truth_logits = truth.logits.float()
    if linear.shape != truth_logits.shape:
        return None
    factor = float((linear * truth_logits).sum() / (linear * linear).sum())
    candidates = [HeadScaling(), HeadScaling(factor=factor)]
    cap = getattr(parts.config, "final_logit_softcapping", None)
    if cap is not None:
        # First: the sample's small logits look the same with and without it.
        candidates.insert(0, HeadScaling(cap=float(cap)))
    return next((scaling for scaling in candidates if _close(scaling.apply(linear), truth_logits)), None)


def _close(ours: Tensor, truth: Tensor) -> bool:
    """Largest difference, relative to the largest value."""
    if ours.shape != truth.shape:
        return False
    tolerance = _TOLERANCES.get(ours.dtype, _COARSE_TOLERANCE)
    difference = float((ours.float() - truth.float()).abs().max())
    return difference <= tolerance * max(float(truth.float().abs().max()), 1e-3)


def _sample(parts: Parts, kind: TaskKind, layout: Layout, pad_id: int) -> Batch:
    """Random examples of `_LENGTHS`; per-token tasks have a target at every real position."""
    embeddings = parts.outer.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    vocabulary, device = embeddings.num_embeddings, embeddings.weight.device
    generator = torch.Generator().manual_seed(17)
    texts = [torch.randint(0, vocabulary, (length,), generator=generator) for length in _LENGTHS]
    texts = [torch.where(text == pad_id, (pad_id + 1) % vocabulary, text) for text in texts]
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad_id)
    positions = torch.arange(padded.shape[1]).expand_as(padded)
    real = positions < torch.tensor(_LENGTHS)[:, None]
    flat = layout == "flat"
    where = torch.arange(sum(_LENGTHS)) if flat else real.flatten().nonzero().flatten()
    batch = Batch(
        layout=layout,
        lengths=_LENGTHS,
        input_ids=torch.cat(texts)[None] if flat else padded,
        position_ids=positions[real][None] if flat else positions,
        attention_mask=None if flat else real.long(),
        token_type_ids=None,
        targets=torch.zeros(len(where), dtype=torch.int64),
        target_positions=None if kind in WHOLE_TEXT_KINDS else where,
    )
    return batch.to(device)


def _position_offsets(parts: Parts) -> Iterable[int]:
    """0, and what a table of positions with a padding row suggests (RoBERTa counts from padding_idx + 1)."""
    sizes = (getattr(parts.config, "max_position_embeddings", None),)
    offsets = [
        module.padding_idx + 1
        for module in parts.backbone.modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.num_embeddings in sizes
    ]
    return dict.fromkeys([*offsets, 0])


def _refuse_unknown_layers(config: Any) -> None:
    kinds = getattr(config, "layer_types", None) or ()
    unknown = sorted(set(kinds) - set(_KNOWN_LAYERS))
    if unknown:
        raise FlatUnsupported(f"it has layers of kind {', '.join(unknown)}")


def _refuse_unseen_window(config: Any, seen: frozenset[int], longest: int | None) -> None:
    """A window that only the model's mask knows would be lost. Short samples cannot show it; its size is compared."""
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or seen & {window, window + 1}:
        return
    if getattr(config, "use_sliding_window", True) is False:
        return
    kinds = getattr(config, "layer_types", None)
    uses_it = kinds is None or "sliding_attention" in kinds
    if uses_it and (longest is None or longest > window):
        raise FlatUnsupported(f"its attention window of {window} tokens is not told to the attention function")


@contextmanager
def _quiet(model: nn.Module) -> Generator[None]:
    """Evaluation mode and no graph inside; every module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
