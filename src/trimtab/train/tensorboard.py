"""Steps and evaluations as TensorBoard files. They are a view: `events.jsonl` remains what a run is read from.

tensorboard's record writer is used as it is, on a file of our own: no thread, and TensorFlow is never loaded, even
where it is installed (its event writer would). The import takes 0.1 s, at the first record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

FLUSH_SECONDS = 5.0
"""A viewer sees a step at the latest so much later; an evaluation at once."""

_STEP_TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "peak_bytes": "train/peak_bytes",
}


class TensorBoardWriter:
    """Writes `step` and `eval` events of a run into a folder; others are passed over.

    Each writer makes a file of its own, so a resumed run goes on in the same folder. Its first record also tells
    TensorBoard to forget steps from there on, which an earlier writer recorded and the run does again.
    """

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)
        self._writer: RecordWriter | None = None
        self._flushed_at = time.monotonic()

    def record(self, event: Mapping[str, Any]) -> None:
        """Writes an event (see `trimtab.events`). Raises OSError as the system says."""
        kind = event.get("kind")
        if kind == "step":
            self._write(event, _step_scalars(event))
        elif kind == "eval":
            self._write(event, {f"eval/{name}": float(value) for name, value in event["metrics"].items()})
            self._flush()

    def close(self) -> None:
        """Writes out what is left. A later record would begin a new file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, event: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        step, wall_time = int(event["step"]), float(event.get("time") or time.time())
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        record = Event(wall_time=wall_time, step=step, summary=Summary(value=values))
        if self._writer is None:
            self._writer = _begin(self._folder, step, wall_time)
        self._writer.write(record.SerializeToString())
        if time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()
        self._flushed_at = time.monotonic()


def _step_scalars(event: Mapping[str, Any]) -> dict[str, float]:
    found = {tag: float(event[name]) for name, tag in _STEP_TAGS.items() if event.get(name) is not None}
    tokens, seconds = event.get("tokens"), event.get("step_seconds")
    if tokens is not None and seconds:
        found["train/tokens_per_second"] = tokens / seconds
    return found


def _begin(folder: Path, step: int, wall_time: float) -> RecordWriter:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(_new_file(folder))
    writer.write(Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())
    start = SessionLog(status=SessionLog.START)
    writer.write(Event(wall_time=wall_time, step=step, session_log=start).SerializeToString())
    return writer


def _new_file(folder: Path) -> BinaryIO:
    """A fresh file that sorts after those that are there, since TensorBoard reads them by name."""
    number = len(list(folder.glob("events.out.tfevents.*")))
    while True:
        path = folder / f"events.out.tfevents.{int(time.time()):010d}.{number:06d}.trimtab"
        try:
            return path.open("xb")
        except FileExistsError:
            number += 1
