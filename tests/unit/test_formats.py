"""Files to rows: every format, the lines, the cache, memory-mapped reading."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.data import formats, rowstore
from trimtab.data.formats import Rows, read_rows
from trimtab.errors import DataError

RECORDS = [{"text": f"text {i}, with a comma", "label": "ab"[i % 2]} for i in range(7)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def read(*paths: Path, encoding: str = "utf-8") -> Rows:
    folder = paths[0].parent
    return read_rows([str(path) for path in paths], encoding=encoding, cache_dir=folder / "cache")


def records(rows: Rows) -> list[dict[str, object]]:
    columns = rows.read(rows.columns, 0, len(rows))
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def delimited(delimiter: str) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["text", "label"], delimiter=delimiter, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(RECORDS)
    return out.getvalue()


def as_lines() -> str:
    return "\n".join(json.dumps(record) for record in RECORDS) + "\n"


def table() -> pa.Table:
    return pa.Table.from_pylist(RECORDS)


FILES = {
    "a.csv": delimited(","),
    "a.tsv": delimited("\t"),
    "bom.csv": "\ufeff" + delimited(","),
    "a.jsonl": as_lines(),
    "a.ndjson": as_lines(),
    "lines.json": as_lines(),
    "array.json": json.dumps(RECORDS, indent=1),
    "array.jsonl": json.dumps(RECORDS),
    "wrapped.json": json.dumps({"version": [1, 2], "data": RECORDS, "note": None}),
    "pretty.json": "\n".join(json.dumps(record, indent=2) for record in RECORDS),
    "bom.jsonl": "\ufeff" + as_lines(),
    "a.csv.gz": gzip.compress(delimited(",").encode()),
    "a.jsonl.gz": gzip.compress(as_lines().encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_every_text_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = read(write(tmp_path / name, FILES[name]))
    assert records(rows) == RECORDS
    assert rows.columns == ("text", "label")
    assert len(rows) == rows.table.num_rows == 7


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow", "a.feather", "large.parquet"])
def test_every_table_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path, data = tmp_path / name, table()
    if name == "large.parquet":
        types = [pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
        data = data.cast(pa.schema(list(zip(data.schema.names, types, strict=True))))
    if name.endswith("parquet"):
        pq.write_table(data, path)
    elif name == "a.feather":
        feather.write_feather(data, path)
    else:
        new = pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file
        with new(str(path), data.schema) as writer:
            writer.write_table(data)
    rows = read(path)
    assert records(rows) == RECORDS
    assert rows.location(2).endswith(f"{name}:row 3")


def test_a_folder_stands_for_its_files_in_order(tmp_path: Path) -> None:
    for name, at in (("b.jsonl", 3), ("a.jsonl", 0)):
        write(tmp_path / "set" / name, "\n".join(json.dumps(record) for record in RECORDS[at : at + 3]))
    write(tmp_path / "set" / "README.md", "about")
    write(tmp_path / "set" / ".hidden.csv", "x")
    rows = read(tmp_path / "set")
    assert records(rows) == RECORDS[:6]
    assert rows.location(4).endswith("b.jsonl:2")
    assert len(rows.files) == 2


def test_a_folder_that_datasets_saved_is_read_with_its_class_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    rows = read(tmp_path / "saved")
    assert rows.read(["label"], 0, 2) == {"label": [1, 0]}
    assert rows.class_names == {"label": ("no", "yes")}


def test_files_of_several_formats_are_united_by_column_name(tmp_path: Path) -> None:
    first = write(tmp_path / "a.csv", "text,label\nx,1\n")
    second = write(tmp_path / "b.jsonl", '{"text": "y", "extra": {"k": [1]}}\n')
    rows = read(first, second)
    assert records(rows) == [
        {"text": "x", "label": "1", "extra": None},
        {"text": "y", "label": None, "extra": {"k": [1]}},
    ]
    assert [rows.location(i).rsplit("/", 1)[-1] for i in range(2)] == ["a.csv:2", "b.jsonl:1"]


def test_locations_are_the_physical_lines(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.csv", 'text,label\n"two\nlines",x\n\nplain,y\r\nz,"q\r\nr"\r\nlast,w'))
    assert [rows.location(i).rsplit(":", 1)[1] for i in range(4)] == ["2", "5", "6", "8"]
    assert rows.read(["text"], 0, 1) == {"text": ["two\nlines"]}
    rows = read(write(tmp_path / "a.json", '[\n{"a": 1},\n\n{"a":\n 2}, {"a": 3}]'))
    assert [rows.location(i).rsplit(":", 1)[1] for i in range(3)] == ["2", "4", "5"]


@pytest.mark.parametrize("encoding", ["gbk", "utf-16", "utf-16-le", "latin-1", "cp1252", "shift_jis"])
def test_another_encoding_is_read_when_it_is_named(tmp_path: Path, encoding: str) -> None:
    text = {"latin-1": "café", "cp1252": "“café”", "shift_jis": "日本語"}.get(encoding, "你好，世界")
    rows = read(write(tmp_path / "a.csv", f"text\n{text}\n".encode(encoding)), encoding=encoding)
    assert records(rows) == [{"text": text}]


def test_json_keeps_types_and_fills_missing_keys_with_null(tmp_path: Path) -> None:
    lines = ['{"a": 1, "b": [1], "d": {"x": 1}}', '{"a": 2.5, "c": true}', '{"b": [2.5], "d": {"y": "z"}}']
    rows = read(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert records(rows) == [
        {"a": 1.0, "b": [1.0], "c": None, "d": {"x": 1, "y": None}},
        {"a": 2.5, "b": None, "c": True, "d": None},
        {"a": None, "b": [2.5], "c": None, "d": {"x": None, "y": "z"}},
    ]


def test_values_without_a_common_type_come_back_as_they_were(tmp_path: Path) -> None:
    values: list[object] = [1, "1", None, {"k": [1, "x"]}, [1, "x"], True, 2**70, "你"]
    rows = read(write(tmp_path / "a.jsonl", "\n".join(json.dumps({"v": value}) for value in values)))
    assert rows.read(["v"], 0, len(values))["v"] == values
    assert rowstore.is_json(rows.stored.schema.field("v"))


def test_a_type_that_widens_late_changes_no_earlier_value(tmp_path: Path) -> None:
    count = 3 * formats.BLOCK_ROWS // 2
    lines = [json.dumps({"n": i, "late": None}) for i in range(count)] + ['{"n": 0.5, "late": ["x"]}', '{"n": "t"}']
    rows = read(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert rows.read(["n"], 0, 3)["n"] == [0, 1, 2]
    assert rows.read(["n", "late"], count - 1, count + 2) == {"n": [count - 1, 0.5, "t"], "late": [None, ["x"], None]}
    assert rows.location(count + 1).endswith(f":{count + 2}")


def test_tsv_quotes_are_quotes_only_when_that_reads_cleanly(tmp_path: Path) -> None:
    quoted = read(write(tmp_path / "a.tsv", 'text\tlabel\n"tab\tinside ""x"""\ty\n'))
    assert records(quoted) == [{"text": 'tab\tinside "x"', "label": "y"}]
    bare = read(write(tmp_path / "b.tsv", 'text\tlabel\n"Hi" he said\tx\n"open\ty\n'))
    assert [record["text"] for record in records(bare)] == ['"Hi" he said', '"open']


def test_text_files_give_paragraphs_or_lines(tmp_path: Path) -> None:
    paragraphs = read(write(tmp_path / "a.txt", "one\ntwo\n\n\nthree\r\nfour\n"))
    assert records(paragraphs) == [{"text": "one\ntwo"}, {"text": "three\nfour"}]
    assert paragraphs.location(1).endswith("a.txt:5")
    assert len(read(write(tmp_path / "b.txt", "one\ntwo\nthree"))) == 3
    stray = "".join(f"line {i}\n" for i in range(50)) + "\n" + "".join(f"line {i}\n" for i in range(50))
    assert len(read(write(tmp_path / "c.txt", stray))) == 100


def test_an_unnamed_column_gets_a_name(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.csv", ",text\n0,a\n"))
    assert rows.columns == ("unnamed_1", "text")


def test_the_second_reading_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.csv", FILES["a.csv"])
    first = read(path)

    def refuse(*_: object) -> None:
        raise AssertionError("parsed again")

    monkeypatch.setattr(formats, "_fill", refuse)
    moved = write(tmp_path / "other.csv", FILES["a.csv"])
    again = read(moved)
    assert again.digest == first.digest
    assert again.location(0).endswith("other.csv:2")


def test_a_damaged_cache_is_written_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", FILES["a.csv"])
    digest = read(path).digest
    whole = tmp_path / "cache" / f"rows-{digest[:32]}" / "rows.arrow"
    whole.write_bytes(whole.read_bytes()[:200])
    assert records(read(path)) == RECORDS
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [f"rows-{digest[:32]}"]


def test_the_digest_follows_content_and_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text\nabc\n")
    first, latin = read(path).digest, read(path, encoding="latin-1").digest
    other = read(write(tmp_path / "a.csv", "text\nabd\n")).digest
    assert len({first, latin, other}) == 3


def test_progress_rises_to_the_total(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", FILES["a.csv"])
    seen: list[tuple[int, int]] = []
    read_rows([str(path)], cache_dir=tmp_path / "c", on_progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == 2 * path.stat().st_size


@pytest.mark.parametrize("name", ["a.tsv", "a.txt", "a.json"])
def test_a_look_ahead_does_not_spend_the_budget(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, json.dumps([{"text": "x" * 50}] * 2000, indent=1))
    rows = read_rows([str(path)], cache_dir=tmp_path / "c", budget_bytes=path.stat().st_size)
    assert len(rows) > 1000


def test_pick_reads_any_rows_in_any_order(tmp_path: Path) -> None:
    count = 2 * formats.BLOCK_ROWS
    rows = read(write(tmp_path / "a.csv", "n\n" + "\n".join(map(str, range(count)))))
    for wanted in ([], [0], [5, 3, 3, count - 1, 0], [*range(10), *range(count - 5, count)], [7, count - 1]):
        got = rows.pick(["n"], np.array(wanted, dtype=np.int64))
        assert got == {"n": [str(i) for i in wanted]}


CELL = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6))
def test_what_csv_wrote_is_what_is_read(tmp_path: Path, cells: list[tuple[str, str]]) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b"), *cells])
    rows = read(write(tmp_path / "a.csv", out.getvalue()))
    assert [(r["a"], r["b"]) for r in records(rows)] == cells


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | CELL,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(JSON, min_size=1, max_size=5), ascii_only=st.booleans(), name=st.sampled_from(["a.jsonl", "a.json"])
)
def test_what_json_wrote_is_what_is_read(tmp_path: Path, values: list[object], ascii_only: bool, name: str) -> None:
    made = [{"v": value, "n": i} for i, value in enumerate(values)]
    text = "\n".join(json.dumps(one, ensure_ascii=ascii_only) for one in made)
    text = text if name == "a.jsonl" else json.dumps(made, ensure_ascii=ascii_only, indent=1)
    assert records(read(write(tmp_path / name, text))) == made


def test_reading_loads_no_torch() -> None:
    code = (
        "import sys, trimtab.data.formats, trimtab.data.examples; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reading_needs_little_memory(tmp_path: Path) -> None:
    """A tenth of the promised million rows, with a twentieth of the 2 GB that those may take."""
    path = write(tmp_path / "a.csv", "text,label\n" + "".join(f"a short text {i},x\n" for i in range(100_000)))
    code = (
        "import resource, sys; from pathlib import Path; from trimtab.data.formats import read_rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"rows = read_rows([{str(path)!r}], cache_dir=Path({str(tmp_path)!r}) / 'c')\n"
        "print(len(rows), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    if sys.platform != "linux":
        pytest.skip("ru_maxrss is in KiB on Linux alone")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert int(out[0]) == 100_000
    assert int(out[1]) < 100 * 1024  # KiB


def test_a_hub_name_needs_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install datasets"):
        read_rows(["someone/something"], cache_dir=tmp_path)


def test_what_the_hub_library_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(name: str, *, split: str) -> object:
        raise datasets.exceptions.DatasetGenerationError(f"cannot make {name}\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"'some/set' \(split train\) cannot be read: cannot make some/set Check"):
        read_rows(["some/set"], cache_dir=tmp_path)


def test_a_hub_data_set_is_read_from_what_the_library_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
    local = datasets.load_from_disk(str(tmp_path / "saved"))
    asked: list[tuple[str, str]] = []

    def load(name: str, *, split: str) -> object:
        asked.append((name, split))
        return local

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = read_rows(["someone/something:test"], cache_dir=tmp_path / "c")
    assert asked == [("someone/something", "test")]
    assert records(rows) == RECORDS
    assert rows.location(0) == "someone/something:row 1"
