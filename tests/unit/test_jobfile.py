"""Job files: what is read, what is refused and in which words, and that writing one loses nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import JobError
from trimtab.job import Job, known_keys
from trimtab.jobfile import dump_job, job_from_flags, load_job, parse_job, quoted
from trimtab.jobyaml import plain

MINIMAL = "model:\n  path: some/model\ndata:\n  train: some/data\n"


def refusal(text: str) -> str:
    with pytest.raises(JobError) as caught:
        parse_job(text)
    return str(caught.value)


def with_line(section: str, line: str) -> str:
    """The minimal job with one more line, which is always line 3 (model), 5 (data) or 6 (others)."""
    if section == "model":
        return MINIMAL.replace("path: some/model\n", f"path: some/model\n  {line}\n")
    return MINIMAL + (f"  {line}\n" if section == "data" else f"{section}:\n  {line}\n")


def test_a_minimal_job_takes_every_default() -> None:
    job = parse_job(MINIMAL)
    assert job.model.path == "some/model"
    assert job.training.batch_size == 16


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.0e-4", ".0001", "1e-04", "0.000_1"])
def test_numbers_with_an_exponent_are_numbers(written: str) -> None:
    assert parse_job(with_line("training", f"learning_rate: {written}")).training.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("section", "line", "words"),
    [
        ("training", "learning_rate: 0", "job.yaml:6: training.learning_rate: 0 is not above 0. Use e.g. 2e-4."),
        (
            "training",
            'learning_rate: "1e-4"',
            "'1e-4' in quotes is text, a number is needed. Write 1e-4 without quotes.",
        ),
        (
            "training",
            "batch_size: -8",
            "training.batch_size: -8 is below 1, the smallest value allowed. The default is 16.",
        ),
        ("training", "batch_size: 16.0", "16.0 is not a whole number. Write 16."),
        ("training", "batch_size: 0x10", "'0x10' is not a whole number."),
        ("training", "seed: 007", "'007' is not a whole number."),
        ("training", "epochs: .nan", "training.epochs"),
        ("training", "max_grad_norm: .inf", "inf is not a finite number"),
        ("training", "warmup: true", "true is not a number"),
        ("training", "epochs:", "training.epochs: is empty, a number is needed. The default is 3.0."),
        ("training", "learning_rte: 1", "there is no such key. Did you mean 'learning_rate'?"),
        (
            "method",
            "learning_rate: 1",
            "method.learning_rate: there is no such key. Did you mean 'training.learning_rate'?",
        ),
        ("training", "gradient_accumulation_steps: 4", "training.batch_size counts the examples of one optimizer step"),
        ("training", "zzzqqq: 4", "Known: batch_size, epochs"),
        ("method", "kind: lorra", "'lorra' is not one of full, lora, last_layers. Did you mean 'lora'?"),
        ("machine", "device: gpu", "'gpu' is not one of auto, cpu, cuda"),
        ("machine", "precision: half", "not one of fp32, tf32, fp16, bf16, bf16_weights, auto"),
        ("model", "trust_remote_code: yes", "yes could be the text 'yes' or true"),
        (
            "model",
            "trust_remote_code: 'no'",
            "'no' is text, true or false is needed. Write true or false without quotes.",
        ),
        ("data", "label: no", "job.yaml:5: data.label: no could be the text 'no' or false"),
        ("data", "text: 3", "3 is a number, text or a list of texts is needed. Put it in quotes: '3'."),
        ("data", "text: [a, 3]", "item 2 of the list is 3, text is needed"),
        ("data", "encoding: ' '", "data.encoding: is blank."),
        ("data", "eval: {a: 1}", "keys of its own is not text or a list of texts"),
        ("task", "class_weights: [1, x]", "item 2 of the list is 'x', a number is needed"),
        ("task", "class_weights: [1, .nan]", "is not a finite number"),
        ("task", "kind: [a]", "a list is not one of classification"),
        ("output", "run: &a x", "anchors (&) and aliases (*) are not allowed"),
        (
            "output",
            "run: !!python/object/apply:os.system [ls]",
            "the tag tag:yaml.org,2002:python/object/apply:os.system",
        ),
        ("output", "run: 'x", "not valid YAML"),
        ("output", "run: a: b", "A text with ': ' in it needs quotes"),
    ],
)
def test_each_bad_line_is_named_with_its_cure(section: str, line: str, words: str) -> None:
    message = refusal(with_line(section, line))
    assert words in message
    assert message.startswith("job.yaml:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "job.yaml is empty."),
        ("# only a comment\n", "job.yaml is empty."),
        ("- a\n- b\n", "job.yaml:1: a job file is a mapping of sections (model:, data:, ...), this is a list."),
        ("hello", "this is a single text"),
        (
            "model: some/model\ndata:\n  train: x\n",
            "job.yaml:1: model: a section holds keys below it, not 'some/model'.",
        ),
        ("data:\n  train: x\n", "model.path is missing. Give --model"),
        ("model:\n  path: x\ndata:\n  text: t\n", "job.yaml:3: data.train is missing."),
        (MINIMAL + "trainig:\n  seed: 1\n", "job.yaml:5: trainig: there is no such key. Did you mean 'training'?"),
        (MINIMAL + "learning_rate: 1\n", "Did you mean 'training.learning_rate'?"),
        (MINIMAL + "lr: 1\n", "Did you mean 'training.learning_rate'?"),
        (MINIMAL + "model:\n  path: y\n", "job.yaml:5: model: stands here and on line 1."),
        (MINIMAL + "? [a]\n: b\n", "a key must be a plain word"),
        ("a: " + "[" * 30 + "]" * 30, "nested deeper than 20 levels"),
        (MINIMAL + "---\nmodel: {}\n", "holds one document"),
        ("model:\n\tpath: x\n", "Indent with spaces"),
        (MINIMAL + "output:\n  run: a\x1b[2J\n", "job.yaml:6: holds a control character"),
        ("a: &a [x,x]\nb: &b [*a,*a]\n", "aliases (*) are not allowed"),
    ],
)
def test_each_broken_file_is_explained(text: str, words: str) -> None:
    assert words in refusal(text)


def test_all_problems_are_told_at_once_in_the_order_of_the_file() -> None:
    message = refusal(MINIMAL + "training:\n  seed: -1\n  epochs: 0\n  lr: 1\nmethod:\n  rank: 0\n")
    lines = message.splitlines()
    assert lines[0] == "4 problems in job.yaml:"
    assert [line.split(":")[1] for line in lines[1:]] == ["6", "7", "8", "10"]


def test_a_hostile_key_cannot_steer_the_terminal() -> None:
    message = refusal(MINIMAL + '"\\e[2Jx": 1\n')
    assert "\x1b" not in message
    assert "\\x1b[2Jx" in message


def test_a_huge_number_of_problems_is_cut() -> None:
    message = refusal(MINIMAL + "".join(f"zz{n}: 1\n" for n in range(100)))
    assert len(message.splitlines()) == 22
    assert message.endswith("... and 80 more.")


# ---------------------------------------------------------------------------------------------------------------- file


def write(folder: Path, content: str | bytes, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "job.yaml")
    with pytest.raises(JobError, match=r"there is no job file .*jib\.yaml\. Did you mean .*job\.yaml"):
        load_job(tmp_path / "jib.yaml")
    with pytest.raises(JobError, match="no folder"):
        load_job(tmp_path / "nowhere" / "job.yaml")


def test_a_folder_is_refused_and_its_job_file_named(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    with pytest.raises(JobError, match=r"is a folder, not a job file\. Name the file, for instance job\.yaml"):
        load_job(tmp_path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x00\x01\x02", "binary file"),
        (MINIMAL.encode("utf-16"), "UTF-16"),
        ("model:\n  path: \u4f60".encode("gbk"), r"job\.yaml:2: byte 0xc4 is not UTF-8"),
        (b"#" * 1_000_001, "larger than 1,000,000 bytes"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    with pytest.raises(JobError, match=words):
        load_job(write(tmp_path, raw))


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()))
    assert job.model.path == "some/model"


def test_inputs_are_looked_for_beside_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jobs"
    (folder / "model").mkdir(parents=True)
    (folder / "rows").mkdir()
    text = (
        "model:\n  path: model\ndata:\n  train: [rows, absent.csv, imdb]\n  eval: ../more/e.jsonl\n"
        "  template: t.jinja\n"
        "output:\n  run: runs/x\n"
    )
    path = write(folder, text)
    monkeypatch.chdir(tmp_path)
    job = load_job(path)
    assert job.model.path == str(folder / "model")
    assert job.data.train == [str(folder / "rows"), str(folder / "absent.csv"), "imdb"]
    assert Path(str(job.data.eval)) == folder / ".." / "more" / "e.jsonl"
    assert job.data.template == str(folder / "t.jinja")
    assert job.output.run == "runs/x", "what is written goes to the current folder"


def test_hub_ids_and_template_names_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatml").mkdir()
    job = job_from_flags({"model.path": "Qwen/Qwen2.5-0.5B", "data.train": "imdb", "data.template": "chatml"})
    assert (job.model.path, job.data.train, job.data.template) == ("Qwen/Qwen2.5-0.5B", "imdb", "chatml")


def test_paths_on_the_command_line_start_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_folder = tmp_path / "jobs"
    job_folder.mkdir()
    path = write(job_folder, MINIMAL)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "text,label\n", "d.csv")
    assert load_job(path, {"data.train": "d.csv"}).data.train == str(tmp_path / "d.csv")


# ----------------------------------------------------------------------------------------------------------- overrides


def flags(**more: str) -> Job:
    named = {name.replace("__", "."): value for name, value in more.items()}
    return job_from_flags({"model.path": "m", "data.train": "d", **named})


def test_overrides_are_read_as_yaml() -> None:
    job = flags(training__learning_rate="2e-4", data__text="[a, b]", model__trust_remote_code="true")
    assert job.training.learning_rate == 2e-4
    assert job.data.text == ["a", "b"]
    assert job.model.trust_remote_code is True


def test_text_keys_take_bare_text_from_the_shell() -> None:
    job = flags(output__run="2024", data__label="no", data__answer_marker="### Response:")
    assert (job.output.run, job.data.label, job.data.answer_marker) == ("2024", "no", "### Response:")


def test_null_goes_back_to_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "  eval: e.csv\n")
    assert load_job(path, {"data.eval": "null"}).data.eval is None


def test_overrides_win_over_the_file_and_keep_its_other_keys(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "training:\n  seed: 3\n  epochs: 2\n")
    job = load_job(path, {"training.seed": "5"})
    assert (job.training.seed, job.training.epochs) == (5, 2)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("training.learning_rte", "1", "--set training.learning_rte: there is no such key."),
        ("learning_rate", "1", "is not a key; keys look like training.epochs. Did you mean 'training.learning_rate'?"),
        ("training.epochs", "three", "--set training.epochs: 'three' is not a number."),
        ("training.epochs", "[", "--set training.epochs: not valid YAML"),
        ("training.seed", "no", "--set training.seed: no could be the text 'no' or false"),
    ],
)
def test_bad_overrides_are_named(key: str, value: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        job_from_flags({"model.path": "m", "data.train": "d", key: value})
    assert words in str(caught.value)


def test_missing_model_and_data_are_asked_for_by_their_flags() -> None:
    with pytest.raises(JobError) as caught:
        job_from_flags({})
    assert "--model" in str(caught.value)
    assert "--data" in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- round trip

# YAML itself has no control characters; the dumper escapes the others.
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.strip)
tricky = st.sampled_from(
    ["no", "1e-4", "~", "null", "0755", ".inf", "12:30", "- a", "a: b", "# c", "'", '"', "a\x85b", "y"]
)


@settings(max_examples=60, deadline=None)
@given(
    path=texts | tricky,
    columns=st.lists(texts | tricky, min_size=1, max_size=3),
    rate=st.floats(1e-300, 10),
    epochs=st.floats(1e-9, 10_000),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_job_written_and_read_is_the_same_job(
    path: str, columns: list[str], rate: float, epochs: float, seed: int
) -> None:
    job = Job.model_validate(
        {
            "model": {"path": path},
            "data": {"train": path, "text": columns},
            "training": {"learning_rate": rate, "epochs": epochs, "seed": seed},
        }
    )
    assert parse_job(dump_job(job)) == job


@given(texts | tricky)
def test_quoted_text_is_read_back_as_that_text(value: str) -> None:
    job = job_from_flags({"model.path": quoted("m"), "data.train": quoted("d"), "data.answer_marker": quoted(value)})
    assert job.data.answer_marker == value
    listed = f"[{quoted(value)}, {quoted('a, b')}]"
    assert job_from_flags({"model.path": "m", "data.train": "d", "data.text": listed}).data.text == [value, "a, b"]


@given(st.floats(allow_nan=False))
def test_every_float_survives_the_plain_reader(value: float) -> None:
    if math.isfinite(value):
        assert plain(repr(value)) == value


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_no_text_whatever_gives_another_error_than_ours(text: str) -> None:
    try:
        parse_job(text)
    except JobError as error:
        assert str(error).strip()


junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(known_keys())), junk)
def test_any_value_under_any_key_is_taken_or_refused_in_our_words(key: str, value: Any) -> None:
    from trimtab import jobyaml

    section, name = key.split(".")
    base: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "d"}}
    base.setdefault(section, {})[name] = value
    try:
        parse_job(jobyaml.dump(base))
    except JobError as error:
        assert "Input should" not in str(error)


# ------------------------------------------------------------------------------------------------------------ examples

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["vader", "usaddress", "snownlp", "trec", "alpaca"])
def test_every_example_job_loads_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = load_job(EXAMPLES / f"{name}.yaml")
    assert Path(str(job.data.train)).parent == EXAMPLES / "data"
    assert Path(job.model.path).parent == EXAMPLES / "data"
    assert job.output.run == f"runs/{name}"
