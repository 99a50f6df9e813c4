"""A wish to stop: Ctrl-C and the system's signals set a flag, which the loop polls between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
"""Those that the system has; SIGHUP is missing on Windows, SIGBREAK elsewhere."""


class StopRequest:
    """Within this context the signals only set `requested`, so that the step is finished and saved.

    A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread Python delivers no signals, so there the
    flag is simply never set.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.signal_name = signal.Signals(number).name

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for name in NAMES:
                if name in signal.Signals.__members__:
                    which = signal.Signals[name]
                    self._before[which] = signal.signal(which, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for which, handler in self._before.items():
            # None: it was not set from Python, which cannot put it back.
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
        self._before = {}
