"""Collects every fault of the data, so that one run names them all. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.errors import DataError

SHOWN = 20
"""So many faults are kept in full; the rest are counted."""
STOP_AFTER = 1000
"""A file with more faults than this is the wrong file, not a file with faults; reading stops."""


class TooManyProblemsError(Exception):
    """Internal: `STOP_AFTER` faults were found; the collector holds them."""


class Problems:
    """Faults in the order they were found, each with its place and the cure."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []
        self._first: tuple[str, str, str] | None = None

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, location: str, message: str, cure: str) -> None:
        """One fault. `location` is `file:line` or `file`; `message` is a sentence with its numbers.

        Raises:
            TooManyProblemsError: this was fault number `STOP_AFTER`.
        """
        self.count += 1
        if self._first is None:
            self._first = (location, message, cure)
        if len(self._shown) < SHOWN:
            self._shown.append(f"{location}: {message}")
        if self.count >= STOP_AFTER:
            raise TooManyProblemsError

    def raise_if_any(self) -> None:
        """Raises one DataError with the first fault as its message and all of them in `problems`."""
        if self._first is None:
            return
        location, message, cure = self._first
        raise DataError(message + self._more(), cure=cure, location=location, problems=[*self._shown, *self._hidden()])

    def _more(self) -> str:
        if self.count == 1:
            return ""
        others = f"{self.count - 1} more" if self.count < STOP_AFTER else f"at least {self.count - 1} more"
        return f" ({others} {'problem' if self.count == 2 else 'problems'})"

    def _hidden(self) -> Sequence[str]:
        hidden = self.count - len(self._shown)
        return [f"and {hidden} more"] if hidden else []
