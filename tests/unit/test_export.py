"""The finished model: written whole or not at all, loaded by the plain libraries, with a card that cannot be broken."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from model_folders import CHAT, CLASSES, TAGS, save_bert, save_llama

from trimtab.data.task import TaskSpec
from trimtab.errors import ModelError, RunError
from trimtab.export import final
from trimtab.export.model_card import CardFacts, markdown, model_card, yaml_text
from trimtab.job import MethodSection
from trimtab.models import adapters, load
from trimtab.models.facts import read_facts, read_licence

CARD = CardFacts(
    title="topics",
    base_model="owner/tiny",
    kind="classification",
    method="full",
    method_description="All weights: 10 of 10 parameters train (100.00%).",
    base_licence="apache-2.0",
    label_names=("bad", "good"),
    data={"train.csv": 1234},
    settings={"batch size": 16, "learning rate": 5e-5, "seed": 0},
    metrics_before={"accuracy": 0.25},
    metrics_after={"accuracy": 0.9753, "loss": 0.1},
    notes=("Weights were stored as Q4_1.",),
    run="runs/topics-1",
)
METHODS = {
    "full": MethodSection(),
    "lora": MethodSection(kind="lora", rank=4),
    "last_layers": MethodSection(kind="last_layers", last_layers=1),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


def _trained(base: Path, spec: TaskSpec, method: str) -> tuple[torch.nn.Module, Any]:
    """A model whose trained weights have moved, and its tokenizer."""
    tokenizer = load.load_tokenizer(base)
    loaded = load.load_model(base, read_facts(base), spec, pad_id=tokenizer.pad_id)
    model = adapters.apply_method(loaded.model, METHODS[method], spec, seed=0, new_weights=loaded.new_weights).model
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in (p for p in model.parameters() if p.requires_grad):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return model, tokenizer.tokenizer


def _logits(model: Any, tokenizer: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**tokenizer("the cat sat", return_tensors="pt", return_token_type_ids=False)).logits


@pytest.mark.parametrize("method", ["full", "last_layers", "lora"])
@pytest.mark.parametrize("spec", [CLASSES, TAGS, CHAT], ids=lambda spec: spec.kind)
def test_the_lines_of_the_card_load_the_model_with_equal_logits(
    bert: Path, llama: Path, tmp_path: Path, spec: TaskSpec, method: str
) -> None:
    base = llama if spec is CHAT else bert
    model, tokenizer = _trained(base, spec, method)
    card = replace(CARD, kind=spec.kind, method=METHODS[method].kind)
    folder = final.save_final(model, tokenizer, tmp_path / "model", card, base_folder=base)
    text = (folder / "README.md").read_text(encoding="utf-8")
    lines = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert lines is not None
    scope: dict[str, Any] = {}
    code = lines.group(1).replace('"FOLDER"', repr(str(folder))).replace('"BASE"', repr(str(base)))
    exec(compile(code, "README.md", "exec"), scope)
    assert torch.equal(_logits(model, tokenizer), _logits(scope["model"], scope["tokenizer"]))


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("spec", [CLASSES, CHAT], ids=lambda spec: spec.kind)
def test_a_finished_model_is_opened_again(bert: Path, llama: Path, tmp_path: Path, spec: TaskSpec, method: str) -> None:
    base = llama if spec is CHAT else bert
    model, tokenizer = _trained(base, spec, method)
    folder = final.save_final(model, tokenizer, tmp_path / "model", CARD, base_folder=base)
    opened = final.open_final(folder, spec, cache_dir=tmp_path)
    assert opened.is_adapter is (method == "lora") and not opened.model.training
    assert torch.equal(_logits(model, tokenizer), _logits(opened.model, opened.tokenizer.tokenizer))
    assert opened.tokenizer.tokenizer.chat_template == tokenizer.chat_template


def test_an_adapter_whose_base_has_gone_says_so_and_takes_another(bert: Path, tmp_path: Path) -> None:
    model, tokenizer = _trained(bert, CLASSES, "lora")
    gone = tmp_path / "gone"
    folder = final.save_final(model, tokenizer, tmp_path / "model", CARD, base_folder=gone)
    with pytest.raises(ModelError, match="needs its base model") as caught:
        final.open_final(folder, CLASSES, cache_dir=tmp_path)
    assert "base_model_name_or_path" in caught.value.cure
    opened = final.open_final(folder, CLASSES, cache_dir=tmp_path, base_model=str(bert))
    assert torch.equal(_logits(model, tokenizer), _logits(opened.model, tokenizer))


def test_label_names_and_licence_travel_with_the_model(bert: Path, tmp_path: Path) -> None:
    for method in ("full", "lora"):
        model, tokenizer = _trained(bert, CLASSES, method)
        folder = final.save_final(model, tokenizer, tmp_path / method, CARD, base_folder=bert)
        assert read_licence(folder) == "apache-2.0"
        assert '"so-so"' in (folder / "config.json").read_text(encoding="utf-8")
        assert not [p for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
    assert read_facts(tmp_path / "full").label_names == CLASSES.label_names


def test_an_older_model_is_replaced_and_nothing_else_is_left(bert: Path, tmp_path: Path) -> None:
    model, tokenizer = _trained(bert, CLASSES, "full")
    final.save_final(model, tokenizer, tmp_path / "model", CARD, base_folder=bert)
    (tmp_path / "model" / "old.txt").write_text("old", encoding="utf-8")
    final.save_final(model, tokenizer, tmp_path / "model", CARD, base_folder=bert)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "old.txt").exists()


@pytest.mark.parametrize("step", ["_write", "_flush", "_put_in_place"])
def test_a_failure_leaves_the_older_model_whole(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    model, tokenizer = _trained(bert, CLASSES, "full")
    folder = final.save_final(model, tokenizer, tmp_path / "model", CARD, base_folder=bert)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(final, step, full)
    with pytest.raises(RunError, match="No space left on device") as caught:
        final.save_final(model, tokenizer, folder, CARD, base_folder=bert)
    assert "trimtab resume" in caught.value.cure
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_rename_that_fails_puts_the_older_model_back(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = _trained(bert, CLASSES, "full")
    folder = final.save_final(model, tokenizer, tmp_path / "model", CARD, base_folder=bert)
    rename = Path.rename

    def stubborn(self: Path, target: Path) -> Path:
        if target == folder and "-old-" not in self.name:
            raise PermissionError(13, "in use")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stubborn)
    with pytest.raises(RunError, match="in use"):
        final.save_final(model, tokenizer, folder, CARD, base_folder=bert)
    assert read_facts(folder).label_names == CLASSES.label_names


def test_a_run_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no finished model") as caught:
        final.open_final(tmp_path / "model", CLASSES, cache_dir=tmp_path)
    assert "trimtab resume" in caught.value.cure


def test_the_card_says_what_was_done() -> None:
    text = model_card(CARD)
    assert "| accuracy | 0.25 | 0.9753 |" in text and "| loss |  | 0.1 |" in text
    assert r"| train.csv | 1,234 |" in text and "| learning rate | 5e\\-05 |" in text
    assert "trimtab predict runs/topics-1 texts.txt" in text and "Labels: bad, good." in text
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "apache-2.0" and front["base_model"] == "owner/tiny"
    assert front["pipeline_tag"] == "text-classification"
    assert "| torch | " in text and "Q4\\_1" in text
    assert "trimtab chat" in model_card(replace(CARD, kind="instruction"))


def test_a_card_without_metrics_before_or_licence_is_still_right() -> None:
    text = model_card(replace(CARD, metrics_before={}, base_licence=None, base_model="/home/me/secret/tiny"))
    assert "| metric | after |" in text and "names no licence" in text
    assert "/home/me" not in text and "base_model" not in text.split("---")[1]


@given(st.text(max_size=60))
def test_no_text_breaks_out_of_the_front_matter(text: str) -> None:
    facts = replace(CARD, base_licence=text or "x", title=text, label_names=(text,), data={text: 1}, run=text)
    card = model_card(facts)
    front = card.split("\n---\n")[0].removeprefix("---\n")
    assert isinstance(yaml.safe_load(front)["license"], str)
    assert isinstance(yaml.safe_load(yaml_text(text)), str)
    assert card.count("```sh\n") == 1 and card.count("```") == 4
    assert "\n" not in markdown(text)


@given(st.text(max_size=60))
def test_markdown_text_has_no_live_marks(text: str) -> None:
    bare = re.sub(r"\\.", "", markdown(text))
    assert not set(bare) & set("`*_[]<>|#!")
