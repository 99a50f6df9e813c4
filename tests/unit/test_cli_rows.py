"""What `predict` reads and writes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.cli.rows import format_of, merged, open_input, open_output, read_items, write_rows
from trimtab.errors import DataError, RunError


def items(text: str, kind: Any = None) -> list[Any]:
    return list(read_items(io.StringIO(text, newline=""), kind, "d"))


def test_text_is_one_item_a_line_without_blank_lines() -> None:
    assert items("a\r\n\n  \nb, c\n", "text") == ["a", "b, c"]


def test_the_format_of_stdin_is_told_from_its_first_line() -> None:
    assert items('\n{"text": "a"}\n{"text": "b"}\n') == [{"text": "a"}, {"text": "b"}]
    assert items('plain\n{"text": "b"}\n') == ["plain", '{"text": "b"}']


def test_csv_cells_may_hold_line_feeds_and_commas() -> None:
    assert items('a,b\n"x\ny","1,2"\n', "csv") == [{"a": "x\ny", "b": "1,2"}]
    assert items("a\tb\n1\t2\n", "tsv") == [{"a": "1", "b": "2"}]


def test_json_arrays_are_read() -> None:
    assert items('[{"text": "a"}, "b"]', "json") == [{"text": "a"}, "b"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('{"a": 1}\n{"a":\n', "jsonl", "d:2: not valid JSON"),
        ("[1]\n", "jsonl", "d:1: [1] is neither text nor an object"),
        ("[1]", "json", "d, item 1: 1 is neither text nor an object"),
        ("[" * 100_000, "json", "not valid JSON"),
        ("a,b\n1,2\n1,2,3\n", "csv", "d:3: 3 cells, but the header names 2 columns"),
        ("", "csv", "d is empty"),
        ('a\n"b\n', "csv", "not valid CSV"),
    ],
)
def test_a_bad_row_is_named(text: str, kind: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        items(text, kind)
    assert message in str(caught.value)


def test_a_wrong_encoding_names_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes("你好".encode("gbk"))
    with pytest.raises(DataError, match="--encoding gbk"), open_input(str(path)) as stream:
        list(read_items(stream, "text", "d.txt"))
    with open_input(str(path), "gbk") as stream:
        assert list(read_items(stream, "text", "d.txt")) == ["你好"]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\n")
    with open_input(str(path)) as stream:
        assert list(read_items(stream, "text", "d.txt")) == ["hello"]


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "data.txt").touch()
    with pytest.raises(DataError, match=r"Did you mean 'data\.txt'"), open_input(str(tmp_path / "dat.txt")):
        pass


def test_formats_follow_the_ending_or_the_option() -> None:
    assert format_of("x.CSV", None) == "csv"
    assert format_of("x.csv", "text") == "text"
    assert format_of("-", None) is None
    with pytest.raises(DataError, match="--format"):
        format_of("x.docx", None)
    with pytest.raises(DataError, match="Did you mean 'jsonl'"):
        format_of("x", "jsnl")


# -------------------------------------------------------------------------------------------------------------- output


def test_a_prediction_never_hides_an_input_column() -> None:
    assert merged({"text": "a", "label": "gold"}, {"label": "x", "probability": 0.5}) == {
        "text": "a",
        "label": "gold",
        "predicted_label": "x",
        "probability": 0.5,
    }
    same = merged({"text": "a", "label": "x"}, {"label": "x"})
    assert same["predicted_label"] == "x", "the columns do not depend on whether the prediction is right"
    assert merged("a", {"label": "x"}) == {"text": "a", "label": "x"}


def written(rows: list[dict[str, Any]], *, as_csv: bool) -> str:
    stream = io.StringIO()
    write_rows(rows, stream, as_csv=as_csv)
    return stream.getvalue()


def test_csv_cells_are_no_formulas_but_negative_numbers_stay_numbers() -> None:
    text = written([{"text": "=HYPERLINK(1)", "value": -0.5, "p": {"a": 1}, "n": None}], as_csv=True)
    assert text == '"text","value","p","n"\n"\'=HYPERLINK(1)",-0.5,"{""a"": 1}",""\n'
    for start in "=+-@\t\r":
        cells = list(csv.reader(io.StringIO(written([{"text": f"{start}x"}], as_csv=True), newline="")))[1]
        assert cells == [f"'{start}x"]


def test_a_column_that_the_first_row_lacks_is_not_lost_in_silence() -> None:
    with pytest.raises(DataError, match=r"row 2 has the column 'b'.*\.jsonl"):
        written([{"a": 1}, {"a": 1, "b": 2}], as_csv=True)


@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1))
def test_json_lines_survive_any_text(texts: list[str]) -> None:
    lines = written([{"text": text} for text in texts], as_csv=False).split("\n")[:-1]
    assert [json.loads(line)["text"] for line in lines] == texts


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    target = tmp_path / "o.jsonl"
    target.write_text("old", encoding="utf-8")
    with pytest.raises(RunError, match="--force"), open_output(target, force=False):
        pass
    assert target.read_text(encoding="utf-8") == "old"
    with open_output(target, force=True) as stream:
        stream.write("new")
    assert target.read_text(encoding="utf-8") == "new"


def test_a_failure_leaves_neither_a_part_nor_a_change(tmp_path: Path) -> None:
    target = tmp_path / "o.jsonl"
    target.write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), open_output(target, force=True) as stream:
        stream.write("half")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["o.jsonl"]
    assert target.read_text(encoding="utf-8") == "old"


def test_an_output_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no folder"), open_output(tmp_path / "a" / "b.csv", force=False):
        pass
