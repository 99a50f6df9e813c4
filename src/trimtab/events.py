"""Events: what happened in a run, one JSON object a line in `events.jsonl`. See docs/events.md for every field.

The file is only ever appended to, so any other process may read it while training goes on. A torn last line (power
loss, kill) is left out by readers and repaired by the next writer.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

KINDS = ("start", "plan", "data", "step", "eval", "checkpoint", "warning", "resume", "stop", "done")
"""Kinds that are written. A listener also gets `phase`, which tells how far a stage is and is never written."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""JSON has no such numbers: they are written as these words and read back as floats."""


def make_event(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """An event with version and time (unix seconds)."""
    return {"v": SCHEMA_VERSION, "kind": kind, "time": time.time(), **fields}


class EventWriter:
    """Appends events to a file: one line, one write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _repair(path)
        self._file = path.open("ab", buffering=0)

    def write(self, event: dict[str, Any]) -> None:
        """Appends one event."""
        line = json.dumps(_as_json(event), ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode("utf-8", errors="replace") + b"\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _repair(path: Path) -> None:
    """Cuts off a last line without its line break: whoever wrote it was killed in the middle."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _as_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


_NUMBERS = ("loss", "grad_norm", "metrics", "learning_rate")


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """All whole events of a file, in order; torn and foreign lines are left out. Nothing where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("kind"), str) and "time" in event:
                yield {key: _from_json(item) if key in _NUMBERS else item for key, item in event.items()}


def steps_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step events by step; where a resumed run did a step again, its later record counts."""
    steps = {event["step"]: event for event in events if event.get("kind") == "step"}
    return [steps[step] for step in sorted(steps)]
