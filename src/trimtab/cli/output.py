"""How commands speak: results to stdout, everything else to stderr, errors as one calm paragraph and an exit code."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TextIO, TypeVar

import typer

from trimtab.errors import EXIT_INTERRUPTED, DataError, Interrupted, TrimtabError
from trimtab.text import safe

EXIT_UNEXPECTED = 1
SHOWN_PROBLEMS = 20

P = ParamSpec("P")
R = TypeVar("R")


class Session:
    """Options that hold for the whole command line."""

    debug = False


def prepare_streams() -> None:
    """Let consoles that lack a character (Windows code pages) show a stand-in instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def holds_unicode(stream: TextIO) -> bool:
    """Whether any character can be written to `stream` as it is."""
    return (stream.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf32")


def to_json(document: Any, *, indent: int | None = None, stream: TextIO | None = None) -> str:
    """JSON without NaN and Infinity (written as null), in ASCII where the stream cannot hold more."""
    ascii_only = not holds_unicode(stream or sys.stdout)
    return json.dumps(_finite(document), ensure_ascii=ascii_only, indent=indent, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_json(document: Any) -> None:
    """The one JSON document of a command with `--json`."""
    sys.stdout.write(to_json(document, indent=2) + "\n")
    sys.stdout.flush()


def print_line(text: str = "") -> None:
    """One line of a result."""
    sys.stdout.write(safe(text, newlines=True) + "\n")
    sys.stdout.flush()


def print_note(text: str) -> None:
    """One line about what goes on, which is no result."""
    sys.stderr.write(safe(text, newlines=True) + "\n")
    sys.stderr.flush()


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """The command with every error turned into a message and an exit code."""

    @functools.wraps(command)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # Libraries in Rust panic with an error that is no Exception.
            _leave(error, as_json=kwargs.get("as_json") is True)

    return call


def _leave(error: BaseException, *, as_json: bool) -> NoReturn:
    if isinstance(error, BrokenPipeError):
        # The reader has gone (`trimtab runs | head`); keep the interpreter's last flush from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_UNEXPECTED) from None
    if Session.debug:
        traceback.print_exception(error)
    shown = _as_user_error(error)
    _print_error(shown)
    if as_json:
        print_json(
            {"error": shown.message, "cure": shown.cure, "location": shown.location, "exit_code": shown.exit_code}
        )
    raise typer.Exit(shown.exit_code) from None


def _as_user_error(error: BaseException) -> TrimtabError:
    if isinstance(error, TrimtabError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return _with_code(TrimtabError("interrupted."), EXIT_INTERRUPTED)
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        place = f"{error.filename}: " if error.filename is not None else ""
        return TrimtabError(f"{place}{error.strerror}.", cure="Free space on that disk.")
    if isinstance(error, OSError) and error.filename is not None and error.errno in _PATHS:
        return TrimtabError(f"{error.filename}: {error.strerror}.", cure="Check the path and its permissions.")
    where = _write_traceback(error)
    name = type(error).__name__
    summary = safe(str(error).strip().split("\n", maxsplit=1)[0], limit=300)
    message = f"unexpected {name}: {summary}" if summary else f"unexpected {name}"
    cure = f"The details are in {where}." if where else "Run it again with --debug for the details."
    return _with_code(TrimtabError(f"{message.rstrip('.')}.", cure=cure), EXIT_UNEXPECTED)


_DISK_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])
_PATHS = frozenset(
    [
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    ]
)


def _with_code(error: TrimtabError, code: int) -> TrimtabError:
    error.exit_code = code
    return error


def _print_error(error: TrimtabError) -> None:
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    label = "\x1b[1;31merror:\x1b[0m" if color else "error:"
    head = f"{error.location}: " if error.location else ""
    label = "" if isinstance(error, Interrupted) else f"{label} "  # what the user wished is no error
    lines = [f"{label}{safe(head + error.message, newlines=True)}"]
    if isinstance(error, DataError):
        lines += _problem_lines(head + error.message, error.problems)
    if error.cure:
        lines.append(f"  {safe(error.cure, newlines=True)}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _problem_lines(told: str, problems: Sequence[str]) -> list[str]:
    """The problems below the first line, which may name the first of them already."""
    left = problems[1:] if problems and told.startswith(problems[0]) else problems
    hidden = len(left) - SHOWN_PROBLEMS
    lines = [f"  {safe(problem, limit=400)}" for problem in left[:SHOWN_PROBLEMS]]
    return [*lines, f"  ... and {hidden} more."] if hidden > 0 else lines


def _write_traceback(error: BaseException) -> Path | None:
    """The file with the traceback, or None where none can be written."""
    import platformdirs

    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    text = "".join(traceback.format_exception(error))
    for folder in (Path(platformdirs.user_log_path("trimtab")), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            continue
        return folder / name
    return None
