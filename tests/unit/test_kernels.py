from __future__ import annotations

import os
import platform
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from trimtab.kernels import attention, cross_entropy
from trimtab.kernels.attention import AttentionRule, flat_attention
from trimtab.kernels.cross_entropy import CrossEntropySettings, HeadScaling, linear_cross_entropy
from trimtab.kernels.dropout import BitStream, FastDropout, dropout, use_fast_dropout, use_torch_dropout
from trimtab.kernels.host_memory import bound_kernel_cache, keep_freed_memory
from trimtab.kernels.interface import FlatUnsupported, attend, supports_flat
from trimtab.kernels.norms import rms_norm, use_fast_norms, use_own_norms
from trimtab.kernels.segments import Segments


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], rule: AttentionRule) -> Tensor:
    """torch's attention, one example at a time."""
    parts: list[Tensor] = []
    groups = query.shape[1] // key.shape[1]
    for start, length in zip(Segments(lengths).starts, lengths, strict=True):
        rows = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = torch.ones(length, length, dtype=torch.bool)
        if rule.causal:
            seen &= distance >= 0
        if rule.window is not None:
            seen &= distance.abs() < rule.window
        keys, values = (part[:, :, rows].repeat_interleave(groups, 1) for part in (key, value))
        out = functional.scaled_dot_product_attention(query[:, :, rows], keys, values, attn_mask=seen, scale=rule.scale)
        parts.append(out)
    return torch.cat(parts, 2).transpose(1, 2)


def inputs(lengths: tuple[int, ...], heads: int, key_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, sum(lengths), count, 8) for count in (heads, key_heads, key_heads)]
    # As transformers makes them: [1, T, H, D] in memory, seen as [1, H, T, D].
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def gradients(output: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return torch.autograd.grad(output, tensors, torch.randn(output.shape).to(output.dtype))


def relative(ours: Tensor, truth: Tensor) -> float:
    return float((ours.detach() - truth.detach()).norm() / truth.detach().norm().clamp(min=1e-12))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [(5, 17, 16, 33, 1), (500, 40, 390)])
def test_flat_attention_equals_attention_of_each_example(
    causal: bool, window: int | None, heads: tuple[int, int], lengths: tuple[int, ...]
) -> None:
    rule = AttentionRule(causal, 0.3, window)
    tensors = inputs(lengths, *heads)
    ours = flat_attention(*tensors, Segments(lengths), rule)
    truth = reference(*tensors, lengths, rule)
    assert relative(ours, truth) < 1e-6
    for mine, theirs in zip(gradients(ours, tensors), gradients(truth, tensors), strict=True):
        assert relative(mine, theirs) < 3e-6


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=7).map(tuple), st.booleans(), st.sampled_from([None, 1, 5, 64])
)
@settings(max_examples=25, deadline=None)
def test_flat_attention_is_right_for_any_lengths(lengths: tuple[int, ...], causal: bool, window: int | None) -> None:
    rule = AttentionRule(causal, 0.4, window)
    tensors = inputs(lengths, 2, 1)
    ours = flat_attention(*tensors, Segments(lengths), rule)
    truth = reference(*tensors, lengths, rule)
    assert relative(ours, truth) < 1e-6
    # A query that sees one key alone has no gradient: compare absolutely.
    for mine, theirs in zip(gradients(ours, tensors), gradients(truth, tensors), strict=True):
        assert float((mine - theirs).abs().max()) < 1e-5


def test_bf16_attention_stays_near_fp32(lengths: tuple[int, ...] = (44, 20, 130)) -> None:
    rule = AttentionRule(False, 0.3)
    exact = inputs(lengths, 4, 4)
    rough = [part.detach().bfloat16().requires_grad_() for part in exact]
    truth = flat_attention(*exact, Segments(lengths), rule)
    ours = flat_attention(*rough, Segments(lengths), rule)
    assert ours.dtype == torch.bfloat16
    assert relative(ours.float(), truth) < 1e-2
    for mine, theirs in zip(gradients(ours, rough), gradients(truth, exact), strict=True):
        assert relative(mine.float(), theirs) < 2e-2


def test_autocast_attention_takes_mixed_types_and_gives_their_gradients_back() -> None:
    query, key, value = inputs((5, 9), 2, 2)
    mixed = [query, key, value.detach().bfloat16().requires_grad_()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = flat_attention(*mixed, Segments((5, 9)), AttentionRule(True, 0.3))
    assert output.dtype == torch.bfloat16
    assert [grad.dtype for grad in gradients(output, mixed)] == [torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("lengths", [(40, 9), (420,)])
def test_attention_dropout_repeats_with_the_seed_and_its_backward_uses_the_same_mask(lengths: tuple[int, ...]) -> None:
    rule = AttentionRule(False, 0.3, dropout=0.2)
    query, key, value = (part.detach().double() for part in inputs(lengths, 2, 2))
    query, key, value = (part.float() for part in (query, key, value))
    step = torch.randn_like(value)

    def output(shift: float) -> Tensor:
        torch.manual_seed(5)
        return flat_attention(query, key, value + shift * step, Segments(lengths), rule)

    assert torch.equal(output(0.0), output(0.0))
    # The output is linear in the values, so its directional derivative is a difference.
    value.requires_grad_()
    torch.manual_seed(5)
    result = flat_attention(query, key, value, Segments(lengths), rule)
    (grad,) = torch.autograd.grad(result.square().sum() / 2, value)
    expected = float((result.detach() * (output(1.0) - output(0.0)).detach()).sum())
    assert float((grad * step).sum()) == pytest.approx(expected, rel=1e-3)


def test_attention_dropout_keeps_the_mean() -> None:
    lengths = (64,)
    tensors = [part.detach() for part in inputs(lengths, 2, 2)]
    tensors[2] = torch.ones_like(tensors[2])
    torch.manual_seed(0)
    outputs = [flat_attention(*tensors, Segments(lengths), AttentionRule(False, 0.1, dropout=0.3)) for _ in range(60)]
    assert float(torch.stack(outputs).mean()) == pytest.approx(1.0, abs=5e-3)


def test_recomputation_in_the_backward_draws_the_same_dropout() -> None:
    rule = AttentionRule(True, 0.3, dropout=0.3)
    results: list[list[Tensor]] = []
    for recompute in (False, True):
        tensors = inputs((12, 30), 2, 2)
        torch.manual_seed(3)

        def run(*parts: Tensor) -> Tensor:
            return flat_attention(*parts, Segments((12, 30)), rule)

        output = torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False) if recompute else run(*tensors)
        results.append([output.detach(), *gradients(output, tensors)])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_segments_that_do_not_cover_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens, the queries 8"):
        flat_attention(*inputs((8,), 2, 2), Segments((3, 4)), AttentionRule(True, 1.0))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12).map(tuple), st.integers(1, 50_000))
@settings(deadline=None)
def test_buckets_hold_every_example_once_and_within_their_limit(lengths: tuple[int, ...], cells: int) -> None:
    buckets = Segments(lengths).buckets(16, cells)
    spans = [span for bucket in buckets for span in zip(bucket.starts, bucket.lengths, strict=True)]
    assert sorted(spans) == sorted(zip(Segments(lengths).starts, lengths, strict=True))
    for bucket in buckets:
        assert max(bucket.lengths) <= bucket.width and bucket.width % 16 == 0
        assert len(bucket) == 1 or len(bucket) * bucket.width**2 <= cells


def test_attention_outside_a_flat_micro_batch_is_refused() -> None:
    query, key, value = inputs((4,), 2, 2)
    with pytest.raises(FlatUnsupported, match="outside"):
        attend(nn.Identity(), query, key, value)


def test_flat_kernels_exist_on_a_cpu() -> None:
    assert supports_flat(torch.device("cpu"), torch.float32)


# Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    ones = torch.ones(200, 500, dtype=dtype)
    results = torch.stack([dropout(ones, p).float() for _ in range(40)])
    # The rate moves between neighbouring thresholds from call to call; 40 calls come within 1e-3 of it.
    assert float((results == 0).float().mean()) == pytest.approx(p, abs=2e-3)
    assert float(results.mean()) == pytest.approx(1.0, abs=2e-2)
    for call in results:
        assert len(call.unique()) == 2


@given(st.floats(0.001, 0.99), st.integers(0, 2**62))
@settings(deadline=None)
def test_thresholds_are_right_on_average_and_scaled_to_themselves(p: float, seed: int) -> None:
    rate = BitStream(seed).rate(p)
    levels, dropped = (256, rate.threshold) if rate.word == torch.uint8 else (65536, rate.threshold + 32768)
    assert abs(dropped - p * levels) < 1
    assert rate.scale == pytest.approx(1 / (1 - dropped / levels))


def test_the_mean_rate_is_exact() -> None:
    rates = [1 - 1 / BitStream(seed).rate(0.1).scale for seed in range(4000)]
    assert sum(rates) / len(rates) == pytest.approx(0.1, abs=1e-4)


def test_dropout_repeats_with_the_seed_and_its_gradient_is_its_mask() -> None:
    values = torch.randn(64, 33, requires_grad=True)
    torch.manual_seed(7)
    first = dropout(values, 0.2)
    torch.manual_seed(7)
    assert torch.equal(first, dropout(values, 0.2))
    (grad,) = torch.autograd.grad(first.sum(), values)
    assert torch.equal(grad * values, first)


def test_dropout_does_nothing_in_evaluation_or_at_rate_zero() -> None:
    values = torch.randn(5)
    assert dropout(values, 0.5, training=False) is values
    assert dropout(values, 0.0) is values


def test_other_types_and_rates_take_torchs_dropout() -> None:
    assert dropout(torch.ones(100, dtype=torch.float64), 0.5).dtype == torch.float64
    assert dropout(torch.ones(100), 1.0).abs().sum() == 0
    assert dropout(torch.ones(0), 0.5).shape == (0,)


def test_fast_dropout_replaces_and_gives_back_every_plain_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25), nn.ModuleDict({"a": nn.Dropout(0.5)}), nn.Dropout1d(0.5))
    names = list(model.state_dict())
    assert use_fast_dropout(model) == 2
    assert isinstance(model[1], FastDropout) and model[1].p == 0.25
    assert use_fast_dropout(model) == 0
    use_torch_dropout(model)
    assert type(model[1]) is nn.Dropout
    assert list(model.state_dict()) == names


# Norms


def llama_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = values.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(values.dtype)


@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from([1e-6, 1e-2]))
@settings(max_examples=20, deadline=None)
def test_rms_norm_equals_its_definition(rows: int, size: int, epsilon: float) -> None:
    torch.manual_seed(rows)
    values, weight = torch.randn(2, rows, size, requires_grad=True), torch.randn(size, requires_grad=True)
    ours, truth = rms_norm(values, weight, epsilon), llama_norm(values, weight, epsilon)
    assert relative(ours, truth) < 1e-6
    for mine, theirs in zip(gradients(ours, [values, weight]), gradients(truth, [values, weight]), strict=True):
        assert float((mine - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max()) + 1e-4 * (size == 1)


def test_bf16_rms_norm_stays_near_fp32() -> None:
    torch.manual_seed(0)
    values, weight = torch.randn(30, 64, requires_grad=True), torch.rand(64).add(0.5).requires_grad_()
    rough = [part.detach().bfloat16().requires_grad_() for part in (values, weight)]
    ours, truth = rms_norm(*rough, 1e-6), rms_norm(values, weight, 1e-6)
    assert relative(ours.float(), truth) < 1e-2
    for mine, theirs in zip(gradients(ours, rough), gradients(truth, [values, weight]), strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative(mine.float(), theirs) < 2e-2


class PlainNorm(nn.Module):
    """Like transformers' RMSNorm; `shift` makes it Gemma's, which is another function."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.variance_epsilon = 1e-5
        self.shift = shift

    def forward(self, hidden_states: Tensor) -> Tensor:
        return llama_norm(hidden_states, self.weight + self.shift, self.variance_epsilon)


def test_only_modules_that_compute_an_rms_norm_get_the_fast_one() -> None:
    model = nn.Sequential(PlainNorm(), PlainNorm(shift=1.0), nn.LayerNorm(16, bias=False), nn.RMSNorm(16))
    values = torch.randn(5, 16)
    expected = [module(values) for module in model]
    assert use_fast_norms(model) == 1
    assert type(model[0]) is not PlainNorm and isinstance(model[0], PlainNorm)
    assert type(model[1]) is PlainNorm
    for module, output in zip(model, expected, strict=True):
        assert relative(module(values), output) < 1e-6
    assert use_fast_norms(model) == 0
    use_own_norms(model)
    assert type(model[0]) is PlainNorm
    assert not hasattr(model[0], "fast_epsilon")


def test_a_fast_norm_takes_mixed_types_the_modules_own_way() -> None:
    model = nn.Sequential(PlainNorm())
    use_fast_norms(model)
    assert model(torch.randn(2, 16).bfloat16()).dtype == torch.float32


def test_keeping_freed_memory_is_asked_for_on_glibc_alone() -> None:
    assert keep_freed_memory() == (platform.system() == "Linux" and platform.libc_ver()[0] == "glibc")


def test_the_kernel_cache_is_bounded_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.delenv(name, raising=False)
    bound_kernel_cache()
    assert os.environ[name] == "256"
    monkeypatch.setenv(name, "9")
    bound_kernel_cache()
    assert os.environ[name] == "9"


# Cross-entropy


def plain(settings_: CrossEntropySettings) -> Callable[..., Tensor]:
    def run(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: Tensor | None) -> Tensor:
        logits = settings_.scaling.apply(functional.linear(hidden, weight, bias).float())
        losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=settings_.label_smoothing)
        return losses.sum() if rows is None else (losses * rows).sum()

    return run


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scaling", [HeadScaling(), HeadScaling(factor=0.3), HeadScaling(factor=0.5, cap=2.0)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_cross_entropy_equals_the_plain_one(
    smoothing: float, scaling: HeadScaling, weighted: bool, with_bias: bool
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 16, requires_grad=True), torch.randn(97, 16, requires_grad=True)
    bias = torch.randn(97, requires_grad=True) if with_bias else None
    targets, rows = torch.randint(0, 97, (23,)), torch.rand(23) if weighted else None
    options = CrossEntropySettings(smoothing, scaling, chunk_bytes=4 * 97 * 5)
    ours = linear_cross_entropy(hidden, weight, bias, targets, row_weights=rows, settings=options)
    truth = plain(options)(hidden, weight, bias, targets, rows)
    assert ours.item() == pytest.approx(truth.item(), rel=1e-6)
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    for mine, theirs in zip(
        torch.autograd.grad(ours / 7, tensors), torch.autograd.grad(truth / 7, tensors), strict=True
    ):
        assert relative(mine, theirs) < 1e-6


@given(st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_the_chunk_size_changes_nothing_but_rounding(count: int, rows: int) -> None:
    torch.manual_seed(count)
    hidden, weight = torch.randn(count, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    targets = torch.randint(0, 31, (count,))
    results: list[list[Tensor]] = []
    for size in (rows, count):
        options = CrossEntropySettings(chunk_bytes=4 * 31 * size)
        loss = linear_cross_entropy(hidden, weight, None, targets, settings=options)
        results.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen: str) -> None:
    hidden = torch.randn(5, 8, requires_grad=frozen != "hidden")
    weight = torch.randn(31, 8, requires_grad=frozen != "weight")
    linear_cross_entropy(hidden, weight, None, torch.tensor([1, 2, 3, 4, 5])).backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_bf16_weights_give_a_float32_loss_near_the_exact_one() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(64, 32), torch.randn(200, 32) / 6, torch.randint(0, 200, (64,))
    exact = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), None, targets)
    rough = [part.detach().bfloat16().requires_grad_() for part in (hidden, weight)]
    loss = linear_cross_entropy(*rough, None, targets, settings=CrossEntropySettings(chunk_bytes=2 * 200 * 10))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    for mine, theirs in zip(
        torch.autograd.grad(loss, rough), torch.autograd.grad(exact, (hidden, weight)), strict=True
    ):
        assert mine.dtype == torch.bfloat16
        assert relative(mine.float(), theirs) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_float32_gradients_of_float32_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    targets = torch.randint(0, 31, (16,))
    truth = torch.autograd.grad(linear_cross_entropy(hidden, weight, None, targets), (hidden, weight))
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(hidden, weight, None, targets)
    for mine, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), truth, strict=True):
        assert mine.dtype == torch.float32
        assert relative(mine, theirs) < 2e-2


def test_tied_embeddings_get_both_gradients() -> None:
    torch.manual_seed(0)
    weight = torch.randn(31, 8, requires_grad=True)
    ids, targets = torch.randint(0, 31, (9,)), torch.randint(0, 31, (9,))
    ours = linear_cross_entropy(functional.embedding(ids, weight), weight, None, targets)
    truth = functional.cross_entropy(functional.embedding(ids, weight) @ weight.t(), targets, reduction="sum")
    assert relative(*(torch.autograd.grad(loss, weight)[0] for loss in (ours, truth))) < 1e-6


def test_large_logits_leave_no_denormals_in_the_gradient() -> None:
    torch.manual_seed(0)
    hidden, weight = 40 * torch.eye(16, requires_grad=True), torch.eye(16).repeat(4, 1).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, None, torch.arange(16))
    grad = torch.autograd.grad(loss, hidden)[0]
    tiny = torch.finfo(torch.float32).tiny
    assert not ((grad != 0) & (grad.abs() < tiny)).any()


def test_no_targets_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, None, torch.zeros(0, dtype=torch.int64))
    grad = torch.autograd.grad(loss, weight)[0]
    assert loss.item() == 0 and grad.abs().sum() == 0


def test_a_second_backward_through_the_same_graph_says_why_it_fails() -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(31, 8)
    loss = linear_cross_entropy(hidden, weight, None, torch.tensor([1, 2, 3]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs backward once"):
        loss.backward()


def test_memory_limits_are_what_the_docstrings_say() -> None:
    assert cross_entropy.CHUNK_BYTES < 32 << 20
    assert attention._SHORT_WIDTH % 32 == 0  # pyright: ignore[reportPrivateUsage]
