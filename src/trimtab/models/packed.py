"""A transformers model run on micro-batches in either layout, without a line of its own forward being rewritten.

Flat: attention is kept inside each example by a registered attention function, positions start anew in each example,
and hooks pick the rows that the head needs, so no head computes a position without a target. Padded: the model's own
way. `trimtab.models.selfcheck.choose_layout` proves that both give the same before flat is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trimtab.data.batches import Batch, Layout
from trimtab.data.task import WHOLE_TEXT_KINDS
from trimtab.errors import ModelError
from trimtab.job import TaskKind
from trimtab.kernels import interface
from trimtab.kernels.segments import Segments
from trimtab.models import load

Pooling = Literal["first", "mean", "last", "own"]
"""What a whole-text head reads: the first token, the mean, the last token, or (padded only) whatever the model does."""


@runtime_checkable
class _Wrapped(Protocol):
    """A peft model."""

    def get_base_model(self) -> nn.Module: ...


@runtime_checkable
class _Pretrained(Protocol):
    """What this module uses of a transformers model."""

    config: Any

    @property
    def base_model(self) -> nn.Module: ...

    def get_input_embeddings(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module | None: ...


@dataclass(frozen=True)
class Parts:
    """The pieces of a transformers model."""

    outer: nn.Module
    """With its head."""
    backbone: nn.Module
    """Gives the hidden states."""
    before_pooler: nn.Module | None
    """The child of the backbone whose output its pooler reads, when it has a pooler."""
    head: nn.Module | None
    """The last module, for heads that are one module on top of the hidden states."""
    config: Any

    def takes(self, module: nn.Module, name: str) -> bool:
        """True when the module's forward has an argument of this name."""
        return name in inspect.signature(module.forward).parameters


def find_parts(model: nn.Module) -> Parts | None:
    """The pieces of a transformers model, peft's wrapping taken off; None for a model of another make."""
    outer = model.get_base_model() if isinstance(model, _Wrapped) else model
    if not isinstance(outer, _Pretrained):
        return None
    backbone = outer.base_model
    if backbone is outer:
        return None
    children = dict(backbone.named_children())
    names = list(children)
    at = names.index("pooler") if "pooler" in children else 0
    others = [child for child in outer.children() if child is not backbone and any(True for _ in child.parameters())]
    embeddings = outer.get_output_embeddings()
    if embeddings is None and len(others) == 1:
        embeddings = others[0]
    return Parts(
        outer=outer,
        backbone=backbone,
        before_pooler=children[names[at - 1]] if at > 0 else None,
        head=embeddings,
        config=outer.config,
    )


class TextModel:
    """Logits and hidden states of micro-batches in one layout.

    Sets hooks on the model and, when flat, its attention; `close` takes both away again.
    """

    def __init__(
        self,
        parts: Parts,
        kind: TaskKind,
        layout: Layout,
        *,
        pooling: Pooling = "own",
        position_offset: int = 0,
    ) -> None:
        """Raises FlatUnsupported when flat is asked for and the model has no place for positions or attention."""
        self.parts, self.kind = parts, kind
        self.layout: Layout = layout
        self.pooling: Pooling = pooling
        self.position_offset = position_offset
        self._state = interface.FlatState()
        self._pick: Callable[[Tensor], Tensor] | None = None
        self._handles: list[RemovableHandle] = []
        self._attention_before: str | None = None
        self._arguments = {
            module: frozenset(inspect.signature(module.forward).parameters) for module in (parts.outer, parts.backbone)
        }
        if layout == "flat":
            self._make_flat()
        self._handles.append(parts.backbone.register_forward_hook(self._after_backbone))
        if parts.before_pooler is not None:
            self._handles.append(parts.before_pooler.register_forward_hook(self._after_backbone))

    def _make_flat(self) -> None:
        if "position_ids" not in self._arguments[self.parts.backbone]:
            raise interface.FlatUnsupported("its forward takes no position_ids")
        load.register_attention(interface.NAME, interface.attend, interface.no_mask)
        try:
            before = load.set_attention(self.parts.outer, interface.NAME)
        except ModelError as error:
            raise interface.FlatUnsupported(error.message) from error
        if self.parts.config._attn_implementation != interface.NAME:
            raise interface.FlatUnsupported("its attention cannot be replaced")
        self._attention_before = before
        interface.attach(self.parts.outer, self._state)

    @property
    def windows(self) -> frozenset[int]:
        """Attention windows that the model used so far (flat only)."""
        return frozenset(self._state.windows)

    def forget(self) -> None:
        """Drops the last micro-batch's segments, so that a call of the model by someone else fails plainly."""
        self._state.segments = None

    def close(self) -> None:
        """Gives the model back as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._attention_before is not None:
            load.set_attention(self.parts.outer, self._attention_before)
            interface.detach(self.parts.outer)
            self._attention_before = None

    def logits(self, batch: Batch) -> Tensor:
        """[E, classes] for whole-text tasks, [P, tags] or [P, vocabulary] at the target positions for the others."""
        if self.kind not in WHOLE_TEXT_KINDS:
            return self._picked(_rows_at(batch.target_positions), batch).flatten(0, 1)
        if self.pooling == "last":
            assert self.parts.head is not None
            hidden = self._run(self.parts.backbone, batch).last_hidden_state
            return self.parts.head(hidden.flatten(0, 1)[_last_rows(batch)].unsqueeze(1)).flatten(1)
        if self.layout == "padded":
            return self._run(self.parts.outer, batch).logits
        lengths = batch.lengths
        return self._picked(
            _first_rows(batch) if self.pooling == "first" else lambda rows: _means(rows, lengths), batch
        )

    def _picked(self, pick: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
        """Logits of the model whose hidden states are cut down by `pick` before the head reads them."""
        self._pick = pick
        try:
            logits = self._run(self.parts.outer, batch).logits
            # Some models call past their backbone's forward, so that its hook never runs.
            return logits if self._pick is None else self._shaped(pick(logits.flatten(0, 1)))
        finally:
            self._pick = None

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states [P, H] at the target positions: what the head of a language model reads."""
        hidden = self._run(self.parts.backbone, batch).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, _not_none(batch.target_positions))

    def _run(self, module: nn.Module, batch: Batch) -> Any:
        known = self._arguments[module]
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if self.layout == "flat":
            # The filler is a segment of its own: finite, and seen by no example.
            self._state.segments = Segments((*batch.lengths, batch.filler) if batch.filler else batch.lengths)
            inputs["position_ids"] = batch.position_ids + self.position_offset
        else:
            inputs["attention_mask"] = batch.attention_mask
        if batch.token_type_ids is not None and "token_type_ids" in known:
            inputs["token_type_ids"] = batch.token_type_ids
        if "use_cache" in known:
            inputs["use_cache"] = False
        return module(**inputs)

    def _after_backbone(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Cuts the hidden states down to the rows that the head reads: [rows, 1, H], or [1, P, H] for tokens."""
        pick = self._pick
        if pick is None:
            return None
        self._pick = None
        if isinstance(output, Tensor):
            return self._shaped(pick(output.flatten(0, 1)))
        if isinstance(output, tuple):
            return (self._shaped(pick(output[0].flatten(0, 1))), *output[1:])
        output["last_hidden_state"] = self._shaped(pick(output["last_hidden_state"].flatten(0, 1)))
        return output

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows.unsqueeze(1 if self.kind in WHOLE_TEXT_KINDS else 0)


def _not_none(positions: Tensor | None) -> Tensor:
    assert positions is not None, "The task has targets at positions, the batch has none"
    return positions


def _rows_at(positions: Tensor | None) -> Callable[[Tensor], Tensor]:
    where = _not_none(positions)
    return lambda rows: rows.index_select(0, where)


def _starts(batch: Batch) -> list[int]:
    """First position of each example among the flattened positions."""
    if batch.layout == "flat":
        return list(Segments(batch.lengths).starts)
    width = batch.input_ids.shape[1]
    return [row * width for row in range(batch.examples)]


def _first_rows(batch: Batch) -> Callable[[Tensor], Tensor]:
    return _rows_at(torch.tensor(_starts(batch), device=batch.input_ids.device))


def _last_rows(batch: Batch) -> Tensor:
    ends = [start + length - 1 for start, length in zip(_starts(batch), batch.lengths, strict=True)]
    return torch.tensor(ends, device=batch.input_ids.device)


def _means(rows: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Mean of each example's rows, [E, H], summed in float32."""
    parts = rows[: sum(lengths)].split(list(lengths))
    return torch.stack([part.float().mean(0).to(rows.dtype) for part in parts])
