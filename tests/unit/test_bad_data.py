"""Every way in which data can be bad, each with its one message: file, line, what is wrong, and the cure."""

from __future__ import annotations

import gzip
import json
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trimtab.data import textfile
from trimtab.data.examples import ModelHints, prepare
from trimtab.data.formats import read_rows
from trimtab.data.problems import SHOWN
from trimtab.errors import DataError, JobError, TrimtabError
from trimtab.job import Job

ENCODER = ModelHints(is_decoder=False, can_generate=False, model_type="bert")
DECODER = ModelHints(is_decoder=True, can_generate=True, model_type="llama")
LONG = "long text " * 500_000
GOOD = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(20)]


def lines(*records: object) -> str:
    return "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + "\n"


@dataclass(frozen=True)
class Bad:
    """Files by name (text, bytes, or a function that makes one), and what the message must hold."""

    files: dict[str, Any]
    says: tuple[str, ...]
    cure: str
    train: str = ""
    evaluation: str = ""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    task: dict[str, Any] = field(default_factory=dict[str, Any])
    model: ModelHints = ENCODER
    kind: type[TrimtabError] = DataError


def parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), path)
    path.write_bytes(path.read_bytes()[:-7])


def long_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", LONG]}), path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def bad_offsets(path: Path) -> None:
    """An Arrow file whose string offsets point far outside its data."""
    array = pa.array(["abcdefghijk"])
    with pa.ipc.new_file(str(path), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([array], names=["text"]))
    content = path.read_bytes()
    offsets, far = struct.pack("<ii", 0, 11), struct.pack("<ii", 0, 2**30)
    assert content.count(offsets) >= 1
    path.write_bytes(content.replace(offsets, far))


FILES: dict[str, Bad] = {
    "ragged row": Bad(
        {"a.csv": "text,label\nok,x\na, b,x\nc\n"},
        ("a.csv:3:", "3 columns, 2 expected", "'a'", "1 more problem"),
        "double quotes",
    ),
    "too few cells": Bad({"a.csv": "text,label\nok\n"}, ("a.csv:2:", "1 column, 2 expected"), "missing cells"),
    "duplicated header": Bad(
        {"a.csv": "text,label,text\na,b,c\n"}, ("a.csv:1:", "'text' twice", "columns 1 and 3"), "Rename"
    ),
    "unclosed quote": Bad(
        {"a.csv": 'text,label\nok,x\n"open,y\nmore,z\n'}, ("a.csv:3:", "quote", "not closed up to line 4"), "Close it"
    ),
    "quote closed too late": Bad(
        {"a.csv": 'text,label\n"open,y\nmore,z\n"q",w\n'}, ("a.csv:2:", "ends only on line 4"), "Close it"
    ),
    "text after a quote": Bad({"a.csv": 'text,label\n"a"b,x\n'}, ("a.csv:2:", "quotes are not closed"), '""'),
    "endless quote": Bad(
        {"a.csv": 'text,label\nok,x\n"open,y\n' + "more,z\n" * 200_000}, ("a.csv:3:", "not closed"), "Close it"
    ),
    "semicolons": Bad(
        {"a.csv": "text;label\na;x\nb;y\n"}, ("a.csv:1:", "one column", "semicolon in every line"), "comma"
    ),
    "tabs in csv": Bad({"a.csv": "text\tlabel\na\tx\n"}, ("a.csv:1:", "tab in every line"), ".tsv"),
    "commas in tsv": Bad({"a.tsv": "text,label\na,x\n"}, ("a.tsv:1:", "comma in every line"), ".csv"),
    "only a header": Bad({"a.csv": "text,label\n"}, ("a.csv:", "header but no rows"), "with rows"),
    "empty file": Bad({"a.csv": ""}, ("a.csv:", "empty (0 bytes)"), "with rows"),
    "blank file": Bad({"a.csv": "\n\n"}, ("a.csv:", "empty"), "rows"),
    "blank jsonl": Bad({"a.jsonl": "\n \n"}, ("a.jsonl:", "empty"), "rows"),
    "empty array": Bad({"a.json": "[]"}, ("a.json:", "no rows"), "rows"),
    "blank text file": Bad({"a.txt": "\n \n"}, ("a.txt:", "no rows"), "rows"),
    "NUL byte": Bad({"a.csv": "text,label\nok,x\na\0b,y\n"}, ("a.csv:3:", "NUL byte at column 2"), "tr -d"),
    "NUL in jsonl": Bad({"a.jsonl": '{"text": "a"}\n{"text": "\0"}\n'}, ("a.jsonl:2:", "NUL byte"), "tr -d"),
    "utf-16 without a mark": Bad(
        {"a.csv": "text,label\nab,x\n".encode("utf-16-le")}, ("a.csv:1:", "utf-16-le"), "data.encoding: utf-16-le"
    ),
    "utf-16": Bad(
        {"a.csv": "text,label\nab,x\n".encode("utf-16")}, ("a.csv:1:", "byte 0 is 0xff"), "data.encoding: utf-16"
    ),
    "gbk": Bad(
        {"a.csv": "text,label\nok,x\n你好世界,y\n".encode("gbk")},
        ("a.csv:3:", "line 3 is not utf-8: byte 16 is 0xc4", "gbk (a guess)"),
        "data.encoding: gbk",
    ),
    "latin-1": Bad(
        {"a.csv": "text,label\r\ncaf\xe9 noir,x\r\n".encode("latin-1")},
        ("a.csv:2:", "byte 15 is 0xe9"),
        "data.encoding: latin-1",
    ),
    "cp1252": Bad(
        {"a.jsonl": '{"text": "\u201cquoted\u201d"}\n'.encode("cp1252")},
        ("a.jsonl:1:", "byte 10 is 0x93"),
        "data.encoding: cp1252",
    ),
    "gbk in gzip": Bad(
        {"a.csv.gz": gzip.compress("text\n你好世界\n".encode("gbk"))},
        ("a.csv.gz:2:", "byte 5 of the unpacked text is 0xc4"),
        "data.encoding: gbk",
    ),
    "wrong encoding named": Bad(
        {"a.csv": "text\ncaf\xe9\n".encode("latin-1")},
        ("a.csv:2:", "not gbk"),
        "data.encoding: latin-1",
        data={"encoding": "gbk"},
    ),
    "unknown encoding": Bad(
        {"a.csv": "text\nx\n"}, ("data.encoding", "utf-88"), "'utf-8'", data={"encoding": "utf-88"}
    ),
    "not a text encoding": Bad(
        {"a.csv": "text\nx\n"}, ("data.encoding", "base64"), "utf-8", data={"encoding": "base64"}
    ),
    "broken JSON line": Bad(
        {"a.jsonl": lines({"text": "ok"}, '{"text": "a" "label": 1}', {"text": "ok"}, '{"text": ')},
        ("a.jsonl:2:", "broken JSON at column 14", "near", "1 more problem"),
        "one object",
    ),
    "broken JSON file": Bad(
        {"a.json": '[{"text": "a"},\n {"text" "b"}]'}, ("a.json:2:", "broken JSON at column"), "JSON lines"
    ),
    "JSON that ends early": Bad({"a.json": '[{"text": "a"},\n {"text": "b"}'}, ("a.json:2:", "file ends"), "Correct"),
    "text after the array": Bad({"a.json": '[{"text": "a"}]\n]'}, ("a.json:2:", "array has ended"), "Correct"),
    "JSON is text": Bad({"a.json": '"only text"'}, ("a.json:1:", "'[' or '{' expected"), "Correct"),
    "row is a list": Bad({"a.jsonl": lines({"text": "a"}, ["b"])}, ("a.jsonl:2:", "row is a list"), "object"),
    "row is a number": Bad({"a.json": '[{"text": "a"},\n5]'}, ("a.json:2:", "row is a number"), "object"),
    "deep JSON line": Bad(
        {"a.jsonl": '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}\n"}, ("a.jsonl:1:", "more than 32 levels"), "Flatten"
    ),
    "deep JSON file": Bad({"a.json": '[{"a": ' + "[" * 50 + "]" * 50 + "}]"}, ("a.json:1:", "32 levels"), "Flatten"),
    "endless number": Bad({"a.jsonl": '{"a": ' + "1" * 5000 + "}\n"}, ("a.jsonl:1:", "cannot be read"), "as text"),
    "half a character": Bad(
        {"a.jsonl": lines({"text": "ok"}, '{"text": "\\ud83d"}')}, ("a.jsonl:2:", "surrogate", "\\ud83d"), "remove"
    ),
    "5 MB text in csv": Bad({"a.csv": f"text,label\n{LONG},x\n"}, ("a.csv:2:", "single text", "1.0 MiB"), "Cut it"),
    "5 MB text in jsonl": Bad({"a.jsonl": lines({"text": LONG})}, ("a.jsonl:1:", "single text", "1.0 MiB"), "Cut it"),
    "5 MB text in txt": Bad({"a.txt": f"short\n\n{LONG}\n"}, ("a.txt:3:", "single text", "1.0 MiB"), "blank lines"),
    "5 MB text in parquet": Bad({"a.parquet": long_parquet}, ("a.parquet:row 2:", "'text'", "1.0 MiB"), "Cut it"),
    "20 MB line": Bad({"a.jsonl": '{"text": "' + "x" * 20_000_000 + '"}'}, ("a.jsonl:1:",), "Cut"),
    "too many columns": Bad(
        {"a.csv": ",".join(f"c{i}" for i in range(10_001)) + "\n1\n"}, ("a.csv:1:", "10,001 columns"), "Drop"
    ),
    "too many keys": Bad(
        {"a.jsonl": lines(*({f"k{i}_{j}": 1 for j in range(101)} for i in range(100)))},
        ("a.jsonl:1:", "10,000 different keys"),
        "as values",
    ),
    "broken parquet": Bad({"a.parquet": parquet}, ("a.parquet:", "not a whole Parquet file"), "again"),
    "no parquet": Bad({"a.parquet": "text"}, ("a.parquet:", "not a whole Parquet file"), "again"),
    "no arrow": Bad({"a.arrow": "ARROW1 and more"}, ("a.arrow:", "not a whole Arrow file"), "again"),
    "hostile arrow": Bad({"a.arrow": bad_offsets}, ("a.arrow:", "not a whole Arrow file"), "again"),
    "broken gzip": Bad({"a.csv.gz": gzip.compress(b"text\n" + os.urandom(9000))[:-900]}, ("a.csv.gz",), "gzip -t"),
    "no gzip": Bad({"a.csv.gz": "text\na\n"}, ("a.csv.gz", "damaged"), "again"),
    "missing file": Bad({"train.csv": "text\na\n"}, ("trian.csv:", "no such file"), "'train.csv'", train="trian.csv"),
    "missing folder": Bad({}, ("nowhere/a.csv", "no folder"), "Correct the path", train="nowhere/a.csv"),
    "unknown ending": Bad({"a.xlsx": "x"}, ("a.xlsx:", "'.xlsx'"), "CSV"),
    "pickle": Bad({"a.pkl": "x"}, ("a.pkl:", "'.pkl'"), "can run code"),
    "archive": Bad({"a.zip": "x"}, ("a.zip:", "'.zip'"), "Unpack"),
    "folder without data": Bad({"d/a.bin": "x"}, ("d:", "no data files among 1"), "CSV", train="d"),
    "folder of folders": Bad({"d/in/a.csv": "text\na\n"}, ("d:", "no data files"), "d/in", train="d"),
    "folder of two formats": Bad(
        {"d/a.csv": "text\na\n", "d/b.jsonl": '{"text": "b"}'},
        ("d:", "2 formats", "a.csv"),
        "Name the files",
        train="d",
    ),
    "folder of splits": Bad(
        {"d/dataset_dict.json": "{}", "d/test/state.json": "{}", "d/train/state.json": "{}"},
        ("d:", "several splits", "test, train"),
        "d/train",
        train="d",
    ),
    "saved folder that lies": Bad(
        {"d/state.json": '{"_data_files": [{"filename": "../x.arrow"}]}'}, ("state.json",), "save_to_disk", train="d"
    ),
    "broken state": Bad({"d/state.json": "{"}, ("state.json", "not saved whole"), "save_to_disk", train="d"),
    "symlink loop": Bad({"a.csv": loop}, ("a.csv:", "leads back to itself"), "real file"),
}

CHAT = {"role": "user", "content": "hi"}
ROWS: dict[str, Bad] = {
    "wrong text column": Bad(
        {"a.jsonl": lines(*GOOD)}, ("data.text", "'txet'"), "'text'", data={"text": "txet"}, kind=JobError
    ),
    "wrong label column": Bad(
        {"a.jsonl": lines(*GOOD)}, ("data.label", "'Labl'"), "'label'", data={"label": "Labl"}, kind=JobError
    ),
    "wrong group column": Bad(
        {"a.jsonl": lines(*GOOD)}, ("data.group_by", "'lab'"), "'label'", data={"group_by": "lab"}, kind=JobError
    ),
    "three text columns": Bad(
        {"a.csv": "a,b,c,label\n1,2,3,x\n"}, ("3 columns",), "two for a pair", data={"text": ["a", "b", "c"]},
        kind=JobError,
    ),
    "text is the label": Bad(
        {"a.jsonl": lines(*GOOD)}, ("'label'", "text and label"), "data.label",
        data={"text": "label", "label": "label"}, kind=JobError,
    ),
    "eval lacks a column": Bad(
        {"a.jsonl": lines(*GOOD), "e.jsonl": lines({"text": "x", "lable": "a"})},
        ("e.jsonl:", "no column 'label'"),
        "'lable'",
        evaluation="e.jsonl",
    ),
    "number for text": Bad(
        {"a.jsonl": lines(*GOOD, {"text": 5, "label": "a"})}, ("a.jsonl:21:", "'text'", "a number (5)"), "data.text"
    ),
    "list for text": Bad(
        {"a.jsonl": lines(*GOOD, {"text": ["x"], "label": "a"})}, ("a.jsonl:21:", "'text'", "a list"), "data.text"
    ),
    "list for a label": Bad(
        {"a.jsonl": lines(*GOOD, {"text": "x", "label": ["a"]})}, ("a.jsonl:21:", "'label'", "a list"), "data.label"
    ),
    "empty texts": Bad(
        {"a.jsonl": lines(*({"text": " \u200b", "label": "a"} for _ in range(3)))},
        ("a.jsonl:", "none of the 3 rows", "3 with empty text", "a.jsonl:1"),
        "data.text",
    ),
    "labels all missing": Bad(
        {"a.jsonl": lines(*({"text": f"t{i}", "label": [None, "", "NaN"][i % 3]} for i in range(9)))},
        ("none of the 9 rows", "9 with no label"),
        "data.label",
    ),
    "one class": Bad(
        {"a.jsonl": lines(*({"text": f"t{i}", "label": "pos"} for i in range(9)))},
        ("all 9 rows", "'pos'", "'label'"),
        "another class",
    ),
    "more classes than rows": Bad(
        {"a.jsonl": lines(*({"text": f"t{i}", "label": f"name {i}"} for i in range(9)))},
        ("9 different labels in 9 rows",),
        "data.label",
    ),
    "numbers as classes": Bad(
        {"a.jsonl": lines(*({"text": f"t{i}", "label": i * 0.5} for i in range(30)))},
        ("30 different labels in 30 rows", "numbers"),
        "task.kind: regression",
        task={"kind": "classification"},
    ),
    "label only in eval": Bad(
        {"a.jsonl": lines(*GOOD), "e.jsonl": lines(GOOD[0], {"text": "x", "label": "A"}, {"text": "y", "label": "c"})},
        ("e.jsonl:2:", "'A'", "not in training", "1 more problem"),
        "Did you mean 'a'",
        evaluation="e.jsonl",
    ),
    "NaN target": Bad(
        {"a.jsonl": lines(*({"text": f"t{i}", "score": i / 7} for i in range(30)), '{"text": "x", "score": NaN}')},
        ("a.jsonl:31:", "'score'", "nan"),
        "remove the row",
    ),
    "infinite target": Bad(
        {"a.csv": "text,score\n" + "".join(f"t{i},{i / 7}\n" for i in range(30)) + "x,inf\n"},
        ("a.csv:32:", "'score'", "inf"),
        "remove the row",
        task={"kind": "regression"},
    ),
    "decimal comma": Bad(
        {"a.csv": 'text,score\na,1.5\nb,"2,5"\n'},
        ("a.csv:3:", "'2,5'", "a point, not a comma"),
        "Correct it",
        task={"kind": "regression"},
    ),
    "equal targets": Bad(
        {"a.csv": "text,score\na,1.5\nb,1.5\n"}, ("all 2 targets are 1.5",), "data.label", task={"kind": "regression"}
    ),
    "regression on names": Bad(
        {"a.jsonl": lines(*GOOD)}, ("a.jsonl:1:", "'a'", "number"), "classification", task={"kind": "regression"}
    ),
    "flag that is none": Bad(
        {"a.csv": "text,x,y\n" + "".join(f"t{i},{i % 2},1\n" for i in range(9)) + "u,2,0\n"},
        ("a.csv:11:", "'x'", "'2'"),
        "Write 0 or 1",
        data={"label": ["x", "y"]},
        task={"kind": "multilabel_classification"},
    ),
    "several label columns": Bad(
        {"a.csv": "text,x,y\na,1,0\n"},
        ("data.label names 2",),
        "multilabel_classification",
        data={"label": ["x", "y"]},
        task={"kind": "classification"},
        kind=JobError,
    ),
    "one label for many": Bad(
        {"a.jsonl": lines(*GOOD)},
        ("a.jsonl:1:", "'label'", "a list of labels"),
        "task.kind: classification",
        task={"kind": "multilabel_classification"},
    ),
    "words and tags of unequal length": Bad(
        {"a.jsonl": lines({"tokens": ["a", "b"], "tags": ["O", "X"]}, {"tokens": ["a", "b"], "tags": ["O"]})},
        ("a.jsonl:2:", "'tags'", "1 tag for 2 words"),
        "one tag to each word",
    ),
    "a tag that is missing": Bad(
        {"a.jsonl": lines({"tokens": ["a", "b"], "tags": ["O", None]})}, ("a.jsonl:1:", "lacks tag 2"), "one tag"
    ),
    "a word that is a number": Bad(
        {"a.jsonl": lines({"tokens": ["a"], "tags": ["O"]}, {"tokens": [1], "tags": ["O"]})},
        ("a.jsonl:2:", "list of words"),
        "Write",
    ),
    "tokens without tags": Bad(
        {"a.jsonl": lines({"tokens": ["a"]})}, ("needs two columns of lists",), "data.label",
        task={"kind": "token_classification"},
    ),
    "two user turns": Bad(
        {"a.jsonl": lines({"messages": [CHAT, CHAT]})}, ("a.jsonl:1:", "two user turns"), "Correct", model=DECODER
    ),
    "no answer": Bad(
        {"a.jsonl": lines({"messages": [CHAT]})}, ("a.jsonl:1:", "answer must be last"), "Correct", model=DECODER
    ),
    "every answer empty": Bad(
        {"a.jsonl": lines({"instruction": "x", "output": " "})},
        ("none of the 1 rows", "empty answer"),
        "Fill",
        model=DECODER,
    ),
    "chat for an encoder": Bad(
        {"a.jsonl": lines({"instruction": "x", "output": "y"})}, ("needs a model that writes", "bert"), "decoder",
        kind=JobError,
    ),
    "plain text for an encoder": Bad(
        {"a.txt": "one\ntwo\n"}, ("'text'", "no label", "encoder"), "data.label",
    ),
    "label for language modelling": Bad(
        {"a.jsonl": lines(*GOOD)},
        ("reads no label", "'label'"),
        "Remove data.label",
        data={"label": "label"},
        task={"kind": "language_modelling"},
        model=DECODER,
        kind=JobError,
    ),
    "no chat columns": Bad(
        {"a.jsonl": lines(*GOOD)}, ("instruction needs columns messages",), "data.text", task={"kind": "instruction"},
        model=DECODER,
    ),
    "no label column": Bad(
        {"a.csv": "text,other,more\na,b,c\n"}, ("classification needs a label column", "'other'"), "data.label",
        task={"kind": "classification"},
    ),
    "no text column": Bad(
        {"a.csv": "x,y,label\n1,2,a\n"}, ("classification needs a text column",), "data.text",
        task={"kind": "classification"},
    ),
    "columns without meaning": Bad({"a.csv": "x,y\n1,2\n"}, ("a.csv:", "not plain", "'x', 'y'"), "first line"),
    "no split possible": Bad(
        {"a.jsonl": lines(*({**one, "g": 1} for one in GOOD))}, ("one group",), "eval_fraction: 0",
        data={"group_by": "g"},
    ),
}  # fmt: skip


def attempt(folder: Path, bad: Bad, read_only: bool) -> None:
    for name, content in bad.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    train = str(folder / (bad.train or next(iter(bad.files))))
    job = Job.model_validate({"model": {"path": "m"}, "data": {"train": train, **bad.data}, "task": bad.task})
    rows = read_rows([train], encoding=job.data.encoding, cache_dir=folder / "cache")
    assert not read_only, "the file was read without a complaint"
    held = [str(folder / bad.evaluation)] if bad.evaluation else None
    prepare(job, rows, None if held is None else read_rows(held, cache_dir=folder / "cache"), bad.model)


def check(folder: Path, bad: Bad, read_only: bool) -> None:
    with pytest.raises(bad.kind) as caught:
        attempt(folder, bad, read_only)
    message = str(caught.value)
    for part in bad.says:
        assert part in message
    assert bad.cure in caught.value.cure
    assert "\n" not in message and len(message) < 700
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_with_place_and_cure(tmp_path: Path, name: str) -> None:
    if name == "symlink loop" and sys.platform == "win32":
        pytest.skip("symbolic links need a privilege on Windows")
    check(tmp_path, FILES[name], read_only=True)
    cache = tmp_path / "cache"
    assert not cache.exists() or not list(cache.iterdir()), "a refused file leaves nothing in the cache"


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_is_refused_with_place_and_cure(tmp_path: Path, name: str) -> None:
    check(tmp_path, ROWS[name], read_only=False)


def test_all_faults_are_told_at_once_and_the_rest_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "a,b,c\n" * 30 + "ok,x\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("{\n" * 5, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_rows([str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl")], cache_dir=tmp_path / "c")
    assert len(caught.value.problems) == SHOWN + 1
    assert caught.value.problems[0].startswith(f"{tmp_path / 'a.csv'}:2:")
    assert caught.value.problems[-1] == "and 15 more"
    assert "34 more problems" in str(caught.value)


def test_a_file_of_faults_alone_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "a,b,c\n" * 5000, encoding="utf-8")
    with pytest.raises(DataError, match="at least 999 more"):
        read_rows([str(tmp_path / "a.csv")], cache_dir=tmp_path / "c")


@pytest.mark.parametrize("name", ["bomb.csv.gz", "bomb.jsonl.gz", "bomb.parquet", "declared.parquet"])
def test_a_file_that_unpacks_to_too_much_is_stopped(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "bomb.csv.gz":
        path.write_bytes(gzip.compress(b"text\n" + b"aaaaaaa\n" * 1_000_000))
    elif name == "bomb.jsonl.gz":
        path.write_bytes(gzip.compress(b'{"text": "aaa"}\n' * 500_000))
    elif name == "bomb.parquet":
        # One text in a dictionary: the file declares almost nothing and unpacks to 20 MB.
        pq.write_table(pa.table({"text": pa.array(["a" * 10_000] * 2000)}), path)
    else:
        values = pa.array(range(1_000_000))
        pq.write_table(pa.table({"n": values}), path, use_dictionary=False, compression="zstd")
    with pytest.raises(DataError, match=r"unpacks to more than 4\.0 MiB") as caught:
        read_rows([str(path)], cache_dir=tmp_path / "c", budget_bytes=4 * 1024**2)
    assert name in str(caught.value)
    assert not list((tmp_path / "c").iterdir())


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("no named pipes in folders on Windows")
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        read_rows([str(tmp_path / "a.csv")], cache_dir=tmp_path / "c")


def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\na\n", encoding="utf-8")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(DataError, match="no permission"):
        read_rows([str(path)], cache_dir=tmp_path / "c")


def test_permission_errors_say_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without depending on the user who runs the tests."""
    (tmp_path / "a.csv").write_text("text\na\n", encoding="utf-8")
    real = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "a.csv":
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="no permission to read it") as caught:
        read_rows([str(tmp_path / "a.csv")], cache_dir=tmp_path / "c")
    assert "chmod u+r" in caught.value.cure


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na\n", encoding="utf-8")
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    with pytest.raises(DataError, match="taken") as caught:
        read_rows([str(tmp_path / "a.csv")], cache_dir=tmp_path / "taken" / "cache")
    assert "writable" in caught.value.cure


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "a\n" * 10, encoding="utf-8")
    real: Callable[[textfile.TextSource], Any] = textfile.TextSource.open_text

    def grow(self: textfile.TextSource) -> Any:
        with path.open("a", encoding="utf-8") as stream:
            stream.write("more\n")
        return real(self)

    monkeypatch.setattr(textfile.TextSource, "open_text", grow)
    with pytest.raises(DataError, match="changed while it was read"):
        read_rows([str(path)], cache_dir=tmp_path / "c")


def test_hostile_names_cannot_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,\x1b[2Jx,\x1b[2Jx\na,b,c\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_rows([str(tmp_path / "a.csv")], cache_dir=tmp_path / "c")
    assert "\x1b" not in str(caught.value) and r"\x1b[2Jx" in str(caught.value)
