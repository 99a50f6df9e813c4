"""The error tree. Every error a user can cause says what happened, which limit was met, and the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

EXIT_USER_ERROR = 2
EXIT_NOT_FINITE = 4
EXIT_INTERRUPTED = 130


class TrimtabError(Exception):
    """Something the user can mend.

    The message is one sentence or two with the numbers; `cure` is the exact command, option or edit that helps.
    The command line prints both without a traceback and leaves with `exit_code`.
    """

    exit_code = EXIT_USER_ERROR

    def __init__(self, message: str, *, cure: str = "", location: str = "") -> None:
        self.message = message
        self.cure = cure
        self.location = location
        super().__init__(self.render())

    def render(self) -> str:
        """`location: message Cure.` on one line."""
        head = f"{self.location}: " if self.location else ""
        tail = f" {self.cure}" if self.cure else ""
        return f"{head}{self.message}{tail}"


class JobError(TrimtabError):
    """The job file or a flag is wrong: unknown key, bad value, settings that exclude each other."""


class DataError(TrimtabError):
    """Data that cannot be read or trained on. `problems` holds every fault found, in file order."""

    def __init__(self, message: str, *, cure: str = "", location: str = "", problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__(message, cure=cure, location=location)


class ModelError(TrimtabError):
    """A model folder, tokenizer or weight file that cannot be used for the task."""


class MachineError(TrimtabError):
    """The device cannot do what was asked: absent, too small, a type it lacks."""


class RunError(TrimtabError):
    """A Run folder that cannot be written, read or resumed."""


class NotFiniteError(TrimtabError):
    """Too many steps in a row whose loss or gradient was not finite."""

    exit_code = EXIT_NOT_FINITE


class Interrupted(TrimtabError):  # noqa: N818 - what the user wished, no error of anyone
    """Training was asked to stop; the step was finished and a checkpoint saved."""

    exit_code = EXIT_INTERRUPTED


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when none is near. That both end in `.csv` makes nothing near."""
    stem, dot, ending = name.casefold().rpartition(".")
    tail = dot + ending if stem else ""
    folded = {candidate.casefold().removesuffix(tail): candidate for candidate in known}
    found = difflib.get_close_matches(name.casefold().removesuffix(tail), folded, n=1, cutoff=0.55)
    return folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A short hint such as `Did you mean 'label'? Known: text, label.`"""
    known = list(known)
    guess = nearest(name, known)
    listing = f"Known: {', '.join(known)}." if known else ""
    return f"Did you mean '{guess}'? {listing}".strip() if guess else listing
