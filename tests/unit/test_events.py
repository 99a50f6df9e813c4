"""Events survive kills, resumes and numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trimtab.events import EventWriter, make_event, read_events, steps_of


def write(path: Path, *events: dict) -> None:
    with EventWriter(path) as writer:
        for event in events:
            writer.write(event)


def test_events_are_read_back_in_order_with_version_and_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_event("step", {"step": 1, "loss": 0.5}), make_event("eval", {"step": 1, "metrics": {"f1": 1.0}}))
    events = list(read_events(path))
    assert [event["kind"] for event in events] == ["step", "eval"]
    assert all(event["v"] == 1 and event["time"] > 0 for event in events)


def test_numbers_that_are_not_finite_come_back_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_event("step", {"step": 1, "loss": math.nan, "grad_norm": -math.inf}))
    assert all(json.loads(line)["loss"] == "nan" for line in path.read_text(encoding="utf-8").splitlines())
    event = next(read_events(path))
    assert math.isnan(event["loss"]) and event["grad_norm"] == -math.inf


def test_a_message_that_reads_nan_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_event("warning", {"message": "nan"}))
    assert next(read_events(path))["message"] == "nan"


@given(st.integers(0, 400))
def test_a_line_torn_anywhere_is_left_out_and_repaired(tmp_path_factory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    write(path, *(make_event("step", {"step": step, "text": "é" * 20}) for step in range(4)))
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    before = [event["step"] for event in read_events(path)]
    write(path, make_event("resume", {"step": 9}))
    assert [event["step"] for event in read_events(path)] == [*before, 9]


def test_a_step_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    events = [{"kind": "step", "step": step, "loss": loss} for step, loss in ((1, 1.0), (2, 2.0), (2, 3.0))]
    assert [event["loss"] for event in steps_of(events)] == [1.0, 3.0]


def test_line_breaks_in_text_do_not_break_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, make_event("warning", {"message": "a\nb\u2028c\ud800"}))
    assert len(list(read_events(path))) == 1
    assert path.read_bytes().count(b"\n") == 1


def test_no_file_yet_is_no_event(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none.jsonl")) == []
