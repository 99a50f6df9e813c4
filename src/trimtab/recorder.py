"""Everything that happens in a run goes through here: into events.jsonl, TensorBoard, and to whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from trimtab.events import EventWriter, make_event
from trimtab.runs import Run
from trimtab.train.tensorboard import TensorBoardWriter

Listener = Callable[[dict[str, Any]], None]


class Recorder:
    """Writes the events of one run. Until it has a run, events are kept back and told to the listener only."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._waiting: list[dict[str, Any]] = []
        self._writer: EventWriter | None = None
        self._board: TensorBoardWriter | None = None

    def attach(self, run: Run) -> None:
        """Begins to write into a run's folder, with what has happened so far."""
        self._writer = EventWriter(run.events_path)
        self._board = TensorBoardWriter(run.path / "tensorboard")
        for event in self._waiting:
            self._writer.write(event)
        self._waiting = []

    def emit(self, kind: str, **fields: Any) -> None:
        """Records one event."""
        event = make_event(kind, fields)
        if self._writer is None:
            self._waiting.append(event)
        else:
            self._writer.write(event)
        self._show(event)
        if self._listener is not None:
            self._listener(event)

    def _show(self, event: dict[str, Any]) -> None:
        """Adds an event to the TensorBoard files. They are a view: what goes wrong with them never ends a training."""
        board = self._board
        if board is None:
            return
        try:
            board.record(event)
        except (OSError, ImportError) as error:
            self._board = None
            cure = "Training goes on; events.jsonl has every number."
            self.emit("warning", code="tensorboard", message=f"no more TensorBoard files: {error}", cure=cure)

    def phase(self, name: str, done: int, total: int) -> None:
        """Tells the listener how far a stage is; never written."""
        if self._listener is not None:
            self._listener({"kind": "phase", "name": name, "done": done, "total": total, "unit": ""})

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._board is not None:
            with suppress(OSError):
                self._board.close()
