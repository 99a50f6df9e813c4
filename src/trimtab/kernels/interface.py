"""The attention function that a transformers model calls in the flat layout, and what it must know.

transformers hands queries, keys and values to a registered function; where the examples of the micro-batch lie comes
from the `FlatState` of the model that the calling module belongs to. The state is looked up by module, not by context
or thread: recomputation in the backward may run on a thread of torch's own.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trimtab.kernels.attention import AttentionRule, flat_attention
from trimtab.kernels.segments import Segments

NAME = "trimtab_flat"
"""Under this name `attend` and `no_mask` are registered with transformers."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "layer_head_mask")
"""Arguments of attention functions that change the result and that the flat kernels do not know."""


class FlatUnsupported(Exception):  # noqa: N818 - a finding, answered by the padded layout, never shown as an error
    """The model cannot run in the flat layout; the text says why."""


class FlatState:
    """Where the examples of a model's current micro-batch lie. One for each model."""

    def __init__(self) -> None:
        self.segments: Segments | None = None
        self.windows: set[int] = set()
        """Window sizes that attention modules asked for so far."""


_STATES: WeakKeyDictionary[nn.Module, FlatState] = WeakKeyDictionary()


def attach(model: nn.Module, state: FlatState) -> None:
    """All modules of `model` take their segments from `state`."""
    for module in model.modules():
        _STATES[module] = state


def detach(model: nn.Module) -> None:
    """Undoes `attach`."""
    for module in model.modules():
        _STATES.pop(module, None)


def no_mask(**_settings: Any) -> None:
    """The mask function: the flat layout needs no mask, and one of [T, T] would cost more than the attention."""


def supports_flat(device: torch.device, dtype: torch.dtype) -> bool:
    """True where a flat kernel exists: a CPU, or a card of capability 8.0 and newer with 16-bit arithmetic.

    The card's kernel is torch's own variable-length attention; every model passes the self-check before it is used.
    """
    if device.type == "cpu":
        return True
    return device.type == "cuda" and dtype.itemsize == 2 and torch.cuda.get_device_capability(device) >= (8, 0)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention inside each example: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D] and None.

    `settings` are those that transformers passes to attention functions: scaling, dropout, sliding_window, is_causal.
    Raises FlatUnsupported for a mask or a setting that the kernels do not know, or when no micro-batch is set.
    """
    state = _STATES.get(module)
    if state is None or state.segments is None or query.shape[0::2] != (1, state.segments.tokens):
        raise FlatUnsupported("the model was called outside its flat micro-batch")
    refused = [name for name in _UNSUPPORTED if settings.get(name) is not None]
    if attention_mask is not None:
        refused.append("an attention mask of its own")
    if refused:
        raise FlatUnsupported(f"its attention uses {', '.join(refused)}")
    rule = _rule(module, query, settings)
    if rule.window is not None:
        state.windows.add(rule.window)
    if query.device.type == "cpu":
        return flat_attention(query, key, value, state.segments, rule), None
    return _card_attention(query, key, value, state.segments, rule), None


def _rule(module: nn.Module, query: Tensor, settings: dict[str, Any]) -> AttentionRule:
    causal = settings.get("is_causal")
    if causal is None:
        # transformers' contract: an attention module is causal unless it says otherwise.
        causal = getattr(module, "is_causal", True)
    scale = settings.get("scaling")
    return AttentionRule(
        causal=bool(causal),
        scale=float(query.shape[3] ** -0.5 if scale is None else scale),
        window=settings.get("sliding_window"),
        dropout=float(settings.get("dropout") or 0.0),
    )


def _card_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
    if rule.dropout:
        raise FlatUnsupported("its attention has dropout, which torch's variable-length kernel lacks")
    # Not in torch 2.10's public names on every platform, so the import may fail; then the model runs padded.
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise FlatUnsupported("this torch has no variable-length attention") from error
    bounds = torch.tensor([*segments.starts, segments.tokens], dtype=torch.int32, device=query.device)
    longest = max(segments.lengths)
    reach = -1 if rule.window is None else rule.window - 1
    kind = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else value.dtype
    queries, keys, values = (part[0].transpose(0, 1).to(kind) for part in (query, key, value))
    output = varlen_attn(
        queries,
        keys,
        values,
        bounds,
        bounds,
        longest,
        longest,
        scale=rule.scale,
        window_size=(reach, 0 if rule.causal else reach),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)
