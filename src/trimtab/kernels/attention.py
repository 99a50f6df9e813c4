"""Attention inside each example of a flat micro-batch, for CPUs: plain products and softmax with a written backward.

Examples of about the same length are padded to one width and computed together, so a micro-batch costs a few large
products instead of many small ones, and nothing is computed between examples. Measured against torch's
`scaled_dot_product_attention` on one core with AMX (12 heads of 32, bf16, forward and backward): 4 to 12 times as fast
below 512 tokens, since its bf16 backward is slow on a CPU and dropout sends it to its slowest path. Rows of a softmax
that are no multiple of 32 elements in bf16 (16 in fp32) cost up to 4 times as much: hence the widths.

Long examples are cut into blocks of queries whose probabilities are computed again in the backward, so memory grows
with the length, not with its square; causal and windowed blocks skip the keys that they cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trimtab.kernels.dropout import BitStream, Rate, draw_seed, zero_dropped
from trimtab.kernels.segments import Bucket, Segments

_SHORT_WIDTH = 384
"""Up to here probabilities are kept for the backward (2 * heads * width bytes a token); above, computed again."""
_CELL_BYTES = 1 << 20
"""Scores computed at once: about half of a core's second cache."""
_HIDDEN = {torch.float16: -3e4}
"""Score of a pair that must not meet. Finite, so that a padded query, which sees nothing, gives no NaN."""


@dataclass(frozen=True)
class AttentionRule:
    """Which pairs meet and how."""

    causal: bool
    scale: float
    window: int | None = None
    """A query sees keys less than `window` places away, behind it and, when not causal, also ahead; None: all."""
    dropout: float = 0.0
    """Share of attention probabilities set to 0."""


@dataclass(frozen=True)
class _Tile:
    """One block of scores: rows (queries) and columns (keys) of a bucket."""

    rows: slice
    columns: slice


@dataclass(frozen=True)
class _Folded:
    """A bucket's queries, keys and values, copied to one width, with the queries of a group under their key head.

    Shapes: n examples, K key heads, G queries per key head, W width, D and V head sizes.
    """

    queries: Tensor
    """[n * K, G, W, D]"""
    keys: Tensor
    """[n * K, W, D]"""
    values: Tensor
    """[n * K, W, V]"""


def flat_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule) -> Tensor:
    """Attention of each token to those of its own example.

    query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] with H a multiple of K; returns [1, T, H, V].
    Mixed float types are computed in the value's. Raises ValueError when the segments do not hold T tokens.
    """
    if segments.tokens != query.shape[2]:
        raise ValueError(f"The segments hold {segments.tokens} tokens, the queries {query.shape[2]}")
    if torch.is_autocast_enabled(query.device.type):
        value = value.to(torch.get_autocast_dtype(query.device.type))
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = _FlatAttention.apply(query, key, value, segments, rule)
    assert isinstance(output, Tensor)
    return output


class _FlatAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, rule: AttentionRule
    ) -> Tensor:
        heads, tokens = query.shape[1], query.shape[2]
        output = value.new_empty(1, tokens, heads, value.shape[3])
        seed = draw_seed() if rule.dropout else 0
        bits = BitStream(seed) if rule.dropout else None
        buckets = _buckets(segments, query)
        saved: list[Tensor] = []
        with torch.autocast(query.device.type, enabled=False):
            for bucket in buckets:
                folded = _fold(bucket, query, key, value)
                kept = _forward_bucket(bucket, folded, rule, bits, output)
                saved += [folded.queries, folded.keys, folded.values, *kept]
        ctx.save_for_backward(*saved)
        ctx.buckets, ctx.rule, ctx.seed, ctx.heads = buckets, rule, seed, heads
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rule: AttentionRule = ctx.rule
        bits = BitStream(ctx.seed) if rule.dropout else None
        saved = list(ctx.saved_tensors)
        grads: tuple[Tensor, ...] | None = None
        with torch.autocast(gradient.device.type, enabled=False):
            for bucket in ctx.buckets:
                folded = _Folded(*saved[:3])
                short = bucket.width <= _SHORT_WIDTH
                probabilities = saved[3] if short else None
                del saved[: 4 if short else 3]
                grads = grads or _empty_gradients(gradient, folded, len(bucket), ctx.heads)
                parts = _backward_bucket(bucket, folded, rule, bits, gradient, probabilities)
                for whole, part in zip(grads, parts, strict=True):
                    _scatter(bucket, part, whole)
        assert grads is not None
        return (*(grad.transpose(1, 2) for grad in grads), None, None)


def _buckets(segments: Segments, query: Tensor) -> tuple[Bucket, ...]:
    multiple = 32 if query.dtype.itemsize == 2 else 16
    return segments.buckets(multiple, _CELL_BYTES // (query.dtype.itemsize * query.shape[1]))


def _fold(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor) -> _Folded:
    key_heads = key.shape[1]
    groups = query.shape[1] // key_heads
    queries = _gather(bucket, query).view(len(bucket) * key_heads, groups, bucket.width, query.shape[3])
    keys, values = (
        _gather(bucket, part).view(len(bucket) * key_heads, bucket.width, part.shape[3]) for part in (key, value)
    )
    return _Folded(queries, keys, values)


def _gather(bucket: Bucket, flat: Tensor, scale: float = 1.0) -> Tensor:
    """[n, heads, W, D] from [1, heads, T, D], times `scale`; zeros beyond each example's end."""
    heads, size = flat.shape[1], flat.shape[3]
    padded = flat.new_empty(len(bucket), heads, bucket.width, size)
    for at, (start, length) in enumerate(zip(bucket.starts, bucket.lengths, strict=True)):
        source = flat[0, :, start : start + length]
        if scale == 1.0:
            padded[at, :, :length].copy_(source)
        else:
            torch.mul(source, scale, out=padded[at, :, :length])
        if length < bucket.width:
            padded[at, :, length:].zero_()
    return padded


def _scatter(bucket: Bucket, padded: Tensor, flat: Tensor) -> None:
    """Writes [n, heads, W, D] to the examples' places in [1, T, heads, D]."""
    for at, (start, length) in enumerate(zip(bucket.starts, bucket.lengths, strict=True)):
        flat[0, start : start + length].copy_(padded[at, :, :length].transpose(0, 1))


def _empty_gradients(gradient: Tensor, folded: _Folded, examples: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = gradient.shape[1]
    key_heads = folded.keys.shape[0] // examples
    return (
        gradient.new_empty(1, tokens, heads, folded.queries.shape[3]),
        gradient.new_empty(1, tokens, key_heads, folded.keys.shape[2]),
        gradient.new_empty(1, tokens, key_heads, folded.values.shape[2]),
    )


def _tiles(bucket: Bucket, rule: AttentionRule, row_cells: int) -> Iterator[_Tile]:
    """One tile for a short bucket, else blocks of queries with the keys that they can see.

    `row_cells`: how many scores one row of queries costs per key.
    """
    width = bucket.width
    if width <= _SHORT_WIDTH:
        yield _Tile(slice(0, width), slice(0, width))
        return
    block = max(32, min(256, (4 * _CELL_BYTES) // (row_cells * width) // 32 * 32))
    for first in range(0, width, block):
        last = min(first + block, width)
        begin = 0 if rule.window is None else max(0, first - rule.window + 1)
        ahead = last if rule.window is None else min(width, last + rule.window - 1)
        end = last if rule.causal else (width if rule.window is None else ahead)
        yield _Tile(slice(first, last), slice(begin, end))


@lru_cache(maxsize=64)
def _pair_mask(
    rows: tuple[int, int], columns: tuple[int, int], causal: bool, window: int | None, dtype: torch.dtype
) -> Tensor:
    """[rows, columns]: 0 where a query may see a key, else a very low score."""
    distance = torch.arange(*rows)[:, None] - torch.arange(*columns)[None, :]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance.abs() >= window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, _HIDDEN.get(dtype, -1e30))


def _probabilities(bucket: Bucket, folded: _Folded, rule: AttentionRule, tile: _Tile) -> Tensor:
    """Softmax of the scores of a tile: [n * K, G * rows, columns]."""
    queries = folded.queries[:, :, tile.rows].flatten(1, 2)
    keys = folded.keys[:, tile.columns]
    heads, rows, columns = queries.shape[0], queries.shape[1], keys.shape[1]
    scores = queries.new_empty(heads, rows, columns)
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=rule.scale, out=scores)
    if rule.causal or rule.window is not None:
        span = (tile.rows.start, tile.rows.stop), (tile.columns.start, tile.columns.stop)
        mask = _pair_mask(*span, rule.causal, rule.window, scores.dtype)
        scores.view(-1, *mask.shape).add_(mask)
    if not rule.causal:
        _hide_padding(bucket, scores, tile)
    return torch.softmax(scores, -1)


def _hide_padding(bucket: Bucket, scores: Tensor, tile: _Tile) -> None:
    by_example = scores.view(len(bucket), -1, scores.shape[2])
    for at, length in enumerate(bucket.lengths):
        first = max(0, length - tile.columns.start)
        if first < scores.shape[2]:
            by_example[at, :, first:].fill_(_HIDDEN.get(scores.dtype, -1e30))


def _draw(bits: BitStream, probabilities: Tensor, rate: Rate) -> Tensor:
    return bits.keep(tuple(probabilities.shape), rate, probabilities.dtype)


def _forward_bucket(
    bucket: Bucket, folded: _Folded, rule: AttentionRule, bits: BitStream | None, output: Tensor
) -> list[Tensor]:
    """Writes the bucket's outputs to their places; returns the probabilities when the backward needs them."""
    rate = bits.rate(rule.dropout) if bits else None
    groups, size = folded.queries.shape[1], folded.values.shape[2]
    result = folded.values.new_empty(folded.queries.shape[0], groups, bucket.width, size)
    kept: list[Tensor] = []
    for tile in _tiles(bucket, rule, folded.queries.shape[0] * groups * folded.queries.dtype.itemsize):
        probabilities = _probabilities(bucket, folded, rule, tile)
        if bucket.width <= _SHORT_WIDTH:
            kept.append(probabilities)
        if bits and rate:
            probabilities = zero_dropped(probabilities, _draw(bits, probabilities, rate))
        rows = result[:, :, tile.rows]
        block = torch.bmm(probabilities, folded.values[:, tile.columns]).view(rows.shape)
        if rows.shape == result.shape:
            result = block
        else:
            rows.copy_(block)
    if rate:
        result *= rate.scale
    _scatter(bucket, result.view(len(bucket), -1, bucket.width, size), output)
    return kept


def _backward_bucket(
    bucket: Bucket,
    folded: _Folded,
    rule: AttentionRule,
    bits: BitStream | None,
    gradient: Tensor,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [n, heads, W, D] of queries, keys and values; `gradient` is [1, T, H, V].

    With probabilities P, kept ones P' and upstream G: dV = P'^T G; dP = G V^T where kept; dS = P (dP - sum(P dP)).
    """
    rate = bits.rate(rule.dropout) if bits else None
    examples, groups = len(bucket), folded.queries.shape[1]
    upstream = _gather(bucket, gradient.transpose(1, 2), rate.scale if rate else 1.0)
    upstream = upstream.view(-1, groups, bucket.width, gradient.shape[3])
    into = _Sums(folded)
    for tile in _tiles(bucket, rule, folded.queries.shape[0] * groups * folded.queries.dtype.itemsize):
        probabilities = kept if kept is not None else _probabilities(bucket, folded, rule, tile)
        kept_bits = _draw(bits, probabilities, rate) if bits and rate else None
        arriving = upstream[:, :, tile.rows].flatten(1, 2)
        slope = torch.bmm(arriving, folded.values[:, tile.columns].transpose(1, 2))
        used = probabilities
        if kept_bits is not None:
            zero_dropped(slope, kept_bits, out=slope)
            used = zero_dropped(probabilities, kept_bits, out=kept_bits.view(probabilities.dtype))
        into.add_values(tile, torch.bmm(used.transpose(1, 2), arriving))
        slope = torch.ops.aten._softmax_backward_data(slope, probabilities, -1, probabilities.dtype)
        into.add_scores(tile, slope, rule.scale)
    return into.split(examples, bucket.width)


class _Sums:
    """Gradients of a bucket, summed over its tiles: written at once when there is one tile, else in float32."""

    def __init__(self, folded: _Folded) -> None:
        self.folded = folded
        width = folded.queries.shape[2]
        self.whole = width <= _SHORT_WIDTH
        self.queries = folded.queries.new_empty(folded.queries.shape if not self.whole else 0)
        shapes = (0, 0) if self.whole else (folded.keys.shape, folded.values.shape)
        self.keys, self.values = (torch.zeros(shape, dtype=torch.float32) for shape in shapes)

    def add_values(self, tile: _Tile, part: Tensor) -> None:
        if self.whole:
            self.values = part
        else:
            self.values[:, tile.columns] += part

    def add_scores(self, tile: _Tile, slope: Tensor, scale: float) -> None:
        queries = self.folded.queries[:, :, tile.rows].flatten(1, 2)
        keys = self.folded.keys[:, tile.columns]
        query_part = torch.baddbmm(queries, slope, keys, beta=0, alpha=scale)
        key_part = torch.baddbmm(keys, slope.transpose(1, 2), queries, beta=0, alpha=scale)
        if self.whole:
            self.queries, self.keys = query_part, key_part
            return
        rows = self.queries[:, :, tile.rows]
        rows.copy_(query_part.view(rows.shape))
        self.keys[:, tile.columns] += key_part

    def split(self, examples: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """[n, heads, W, D] of each."""
        queries, keys, values = (
            part.view(examples, -1, width, part.shape[-1]) for part in (self.queries, self.keys, self.values)
        )
        return queries, keys, values
