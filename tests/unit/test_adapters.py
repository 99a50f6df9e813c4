"""Methods: which weights train, adapters saved and read back, settings that would be ignored."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import CHAT, CLASSES, TAGS, VALUE
from torch import nn

from trimtab.data.task import TaskSpec
from trimtab.errors import JobError, ModelError
from trimtab.job import MethodSection
from trimtab.models import adapters, blocks
from trimtab.models.weight_files import read_header

SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
LORA = MethodSection(kind="lora", rank=4)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=3))


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    return RobertaForSequenceClassification(RobertaConfig(**SIZES, num_labels=3))


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=60, dim=32, hidden_dim=48, n_layers=3, n_heads=4, num_labels=3)
    return DistilBertForSequenceClassification(config)


def bert_tags() -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification

    return BertForTokenClassification(BertConfig(**SIZES, num_labels=3))


def llama(*, tied: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=tied))


def llama_untied() -> nn.Module:
    return llama(tied=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2))


def qwen_classifier() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    return Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_key_value_heads=2, num_labels=3, pad_token_id=0))


MODELS: list[tuple[Callable[[], nn.Module], TaskSpec]] = [
    (bert, CLASSES),
    (roberta, CLASSES),
    (distilbert, CLASSES),
    (bert_tags, TAGS),
    (llama, CHAT),
    (llama_untied, CHAT),
    (gpt2, CHAT),
    (qwen_classifier, CLASSES),
]
every_model = pytest.mark.parametrize(("build", "spec"), MODELS, ids=lambda value: getattr(value, "__name__", ""))


def _logits(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def _trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _shake(model: nn.Module) -> None:
    """Stands for training: moves what trains."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _step_gradients(model: nn.Module) -> set[str]:
    """Names of the weights that a backward reaches."""
    model.train()
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@every_model
def test_structure_is_found(build: Callable[[], nn.Module], spec: TaskSpec) -> None:
    model = build()
    assert len(blocks.block_list(model)[1]) == 3
    assert len(blocks.head_names(model)) >= 1
    assert blocks.linear_names(model)
    assert any("word" in name or "tok" in name or "wte" in name for name, _ in blocks.embeddings(model))
    assert blocks.is_head_tied(model) is (build in (llama, gpt2))


@every_model
def test_full_trains_everything(build: Callable[[], nn.Module], spec: TaskSpec) -> None:
    model = build()
    applied = adapters.apply_method(model, MethodSection(), spec, seed=0)
    assert applied.trainable_parameters == applied.total_parameters == sum(p.numel() for p in model.parameters())
    assert "(100.00%)" in applied.description and applied.model is model


@every_model
def test_frozen_embeddings_stay_and_the_rest_trains(build: Callable[[], nn.Module], spec: TaskSpec) -> None:
    model = build()
    applied = adapters.apply_method(model, MethodSection(freeze_embeddings=True), spec, seed=0)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"{name}.weight" for name, _ in blocks.embeddings(model)}
    assert bool(applied.warnings) is blocks.is_head_tied(model)
    assert "of the embeddings" in applied.description


@every_model
def test_last_layers_trains_the_top_alone(build: Callable[[], nn.Module], spec: TaskSpec) -> None:
    model = build()
    applied = adapters.apply_method(model, MethodSection(kind="last_layers", last_layers=1), spec, seed=0)
    prefix = blocks.block_list(model)[0]
    names = _trained(model)
    assert names and all(not name.startswith((f"{prefix}.0.", f"{prefix}.1.")) for name in names)
    assert any(name.startswith(f"{prefix}.2.") for name in names)
    tables = {id(table.weight) for _, table in blocks.embeddings(model)}
    assert not any(p.requires_grad for p in model.parameters() if id(p) in tables)
    assert bool(applied.warnings) is blocks.is_head_tied(model)
    head = tuple(f"{name}." for name in blocks.head_names(model))
    assert any(name.startswith(head) for name in names) is not blocks.is_head_tied(model)
    assert _step_gradients(model) == names


def test_last_layers_trains_two_when_the_job_does_not_say() -> None:
    model = bert()
    said = adapters.apply_method(model, MethodSection(kind="last_layers"), CLASSES, seed=0).description
    assert said.startswith("The last 2 of 3 layers and the head")
    assert {n.split(".")[3] for n in _trained(model) if n.startswith("bert.encoder.layer")} == {"1", "2"}
    assert "bert.pooler.dense.weight" in _trained(model)


def test_no_layers_trains_the_head_alone() -> None:
    model = distilbert()
    adapters.apply_method(model, MethodSection(kind="last_layers", last_layers=0), CLASSES, seed=0)
    assert _trained(model) == {f"{n}.{w}" for n in ("pre_classifier", "classifier") for w in ("weight", "bias")}
    decoder = qwen_classifier()
    adapters.apply_method(decoder, MethodSection(kind="last_layers", last_layers=0), CLASSES, seed=0)
    assert _trained(decoder) == {"score.weight"}


def test_no_layers_of_a_tied_model_is_refused() -> None:
    with pytest.raises(JobError, match="leaves nothing to train") as caught:
        adapters.apply_method(llama(), MethodSection(kind="last_layers", last_layers=0), CHAT, seed=0)
    assert "last_layers: 2" in caught.value.cure


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(JobError, match="last_layers: 9` is more than the 3 layers"):
        adapters.apply_method(bert(), MethodSection(kind="last_layers", last_layers=9), CLASSES, seed=0)


def test_new_weights_train_whatever_the_method() -> None:
    new = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    for method in (LORA, MethodSection(kind="last_layers", last_layers=0)):
        model = bert()
        adapters.apply_method(model, method, CLASSES, seed=0, new_weights=new)
        assert any(name.startswith("bert.pooler.dense") and name.endswith("weight") for name in _trained(model))


@pytest.mark.parametrize(
    ("method", "key"),
    [
        (MethodSection(rank=8), "rank: 8"),
        (MethodSection(alpha=1.0), "alpha"),
        (MethodSection(kind="lora", last_layers=2), "last_layers"),
        (MethodSection(kind="lora", freeze_embeddings=True), "freeze_embeddings"),
        (MethodSection(kind="last_layers", target_modules=["query"]), "target_modules"),
    ],
)
def test_settings_without_effect_are_refused(method: MethodSection, key: str) -> None:
    with pytest.raises(JobError, match="has no effect") as caught:
        adapters.apply_method(bert(), method, CLASSES, seed=0)
    assert key in caught.value.message and "method.kind:" in caught.value.cure


@every_model
def test_lora_starts_as_the_base_and_trains_adapters_and_head(build: Callable[[], nn.Module], spec: TaskSpec) -> None:
    model = build()
    linear = set(blocks.linear_names(model))
    before = _logits(model)
    applied = adapters.apply_method(model, LORA, spec, seed=0)
    assert applied.model is model
    assert torch.equal(_logits(model), before)
    names = _trained(model)
    adapted = {name.split(".lora_")[0] for name in names if ".lora_" in name}
    assert adapted == linear
    others = {name.split(".")[0] for name in names if ".lora_" not in name}
    assert others == (set() if spec is CHAT else set(blocks.head_names(build())))
    assert f"on {len(linear)} linear layers" in applied.description
    assert _step_gradients(model) == names


def test_lora_depends_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    base = llama()
    states = []
    for ambient, seed in ((1, 7), (2, 7), (3, 8)):
        torch.manual_seed(ambient)
        model = copy.deepcopy(base)
        adapters.apply_method(model, LORA, CHAT, seed=seed)
        states.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_alpha_is_twice_the_rank_unless_given() -> None:
    model = llama()
    adapters.apply_method(model, LORA, CHAT, seed=0)
    assert model.model.layers[0].self_attn.q_proj.scaling == {"default": 2.0}
    other = llama()
    adapters.apply_method(other, MethodSection(kind="lora", rank=4, alpha=2.0, dropout=0.5), CHAT, seed=0)
    assert other.model.layers[0].self_attn.q_proj.scaling == {"default": 0.5}
    assert other.model.layers[0].self_attn.q_proj.lora_dropout["default"].p == 0.5


@pytest.mark.parametrize(("build", "spec"), [(llama, CHAT), (roberta, CLASSES)])
def test_what_trains_is_float32_on_a_bfloat16_base(build: Callable[[], nn.Module], spec: TaskSpec) -> None:
    model = build().to(torch.bfloat16)
    adapters.apply_method(model, LORA, spec, seed=0)
    types = {p.dtype for p in model.parameters() if p.requires_grad}
    assert types == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_chosen_modules_get_adapters_and_unknown_ones_name_the_nearest() -> None:
    model = llama()
    adapters.apply_method(model, MethodSection(kind="lora", target_modules=["q_proj", "v_proj"]), CHAT, seed=0)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in _trained(model)} == {"q_proj", "v_proj"}
    with pytest.raises(ModelError, match=r"no linear layer 'q_prok'.*Did you mean 'q_proj'"):
        adapters.apply_method(llama(), MethodSection(kind="lora", target_modules=["q_prok"]), CHAT, seed=0)
    with pytest.raises(ModelError, match="'lm_head', which is the head"):
        adapters.apply_method(llama_untied(), MethodSection(kind="lora", target_modules=["lm_head"]), CHAT, seed=0)


@every_model
def test_a_saved_adapter_gives_the_same_logits_through_peft_and_through_us(
    build: Callable[[], nn.Module], spec: TaskSpec, tmp_path: Path
) -> None:
    import peft

    base = build()
    model = copy.deepcopy(base)
    adapters.apply_method(model, LORA, spec, seed=0)
    _shake(model)
    adapters.save_adapter(model, tmp_path, base_model="some/base")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    named = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert named["base_model_name_or_path"] == "some/base"
    ours = adapters.load_adapter(copy.deepcopy(base), tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)  # type: ignore[arg-type]
    assert torch.equal(_logits(model), _logits(ours))
    assert torch.equal(_logits(model), _logits(theirs))
    assert not torch.equal(_logits(model), _logits(base))
    assert adapters.is_adapted(model) and adapters.is_adapted(ours) and not adapters.is_adapted(base)


def test_training_goes_on_after_an_adapter_was_saved(tmp_path: Path) -> None:
    model = llama()
    adapters.apply_method(model, LORA, CHAT, seed=0)
    names = _trained(model)
    adapters.save_adapter(model, tmp_path, base_model="b")
    assert _trained(model) == names
    again = adapters.load_adapter(llama(), tmp_path, trainable=True)
    assert _trained(again) == names


def test_damaged_and_foreign_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no adapter"):
        adapters.load_adapter(llama(), tmp_path)
    model = llama()
    adapters.apply_method(model, LORA, CHAT, seed=0)
    adapters.save_adapter(model, tmp_path, base_model="b")
    with pytest.raises(ModelError, match=r"cannot be loaded|does not fit"):
        adapters.load_adapter(bert(), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ModelError, match="is cut off"):
        adapters.load_adapter(llama(), tmp_path)
    path.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="holds no adapter"):
        adapters.load_adapter(llama(), tmp_path)


def test_regression_keeps_its_head_in_the_adapter(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=1))
    adapters.apply_method(model, LORA, VALUE, seed=0)
    adapters.save_adapter(model, tmp_path, base_model="b")
    assert "base_model.model.classifier.weight" in read_header(tmp_path / "adapter_model.safetensors")


def test_a_model_without_blocks_says_so() -> None:
    with pytest.raises(ModelError, match="no list of equal blocks"):
        adapters.apply_method(nn.Sequential(nn.Linear(2, 2)), LORA, CLASSES, seed=0)
