"""Text that comes from data, models or folders, made safe to print; names that are safe for files on any system."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import unicodedata
from pathlib import Path

from trimtab.errors import RunError

NAME_LIMIT = 64
ELLIPSIS = "…"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RESERVED_ON_WINDOWS = frozenset(
    ["con", "prn", "aux", "nul", *(f"com{n}" for n in range(1, 10)), *(f"lpt{n}" for n in range(1, 10))]
)
# Characters that reorder or hide text on a line: bidirectional controls, zero width, line and paragraph separators.
_HAZARDS = frozenset("\u061c\u200b\u200e\u200f\u2028\u2029\u2060\ufeff") | frozenset(
    chr(code) for code in [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)
_SHORT_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def safe(text: str, *, limit: int | None = None, newlines: bool = False) -> str:
    """`text` with every character that could steer a terminal written as an escape.

    Control characters (C0, DEL, C1 and with them ESC), bidirectional and zero-width ones, line separators and lone
    surrogates become `\\x1b`, `\\u202e` and the like; line feeds stay when `newlines` is true. Joiners that scripts and
    emoji need are kept. The result has at most `limit` characters, the last of which is an ellipsis when it was cut.
    """
    # Escapes only lengthen, so cutting the source first keeps a text of megabytes cheap.
    head = text if limit is None else text[: limit + 1]
    escaped = "".join(_escape(character, newlines) for character in head)
    return escaped if limit is None else cut(escaped, limit)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters (at least 1), the last an ellipsis when something was cut."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + ELLIPSIS


def _escape(character: str, newlines: bool) -> str:
    if character == "\n" and newlines:
        return character
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if character in _HAZARDS or unicodedata.category(character) in ("Cc", "Cs"):
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    return character


def width(text: str) -> int:
    """Columns that `text` takes in a terminal: wide East Asian characters count two, combining ones none."""
    total = 0
    for character in text:
        if unicodedata.combining(character):
            continue
        total += 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
    return total


def shell_word(word: str) -> str:
    """`word` as one word of the user's shell."""
    if sys.platform != "win32":
        return shlex.quote(word)
    return f'"{word}"' if any(character in word for character in " &()^;,'") else word


def shell_path(path: Path) -> str:
    """`path` as one word of the user's shell; one that begins with a dash is no option then."""
    name = str(path)
    return shell_word(f"./{name}" if name.startswith("-") else name)


def program() -> str:
    """What starts this program in the user's shell: its name where the shell finds it, else as it was started now."""
    started, found = Path(sys.argv[0] if sys.argv else ""), shutil.which("trimtab")
    if started.stem == "__main__":
        beside = found is not None and Path(found).parent == Path(sys.executable).parent
        return "trimtab" if beside else f"{shell_word(sys.executable)} -m trimtab"
    if started.stem != "trimtab" or (found is not None and Path(found).parent.absolute() == started.parent.absolute()):
        return "trimtab"
    return shell_word(str(started))


def check_name(name: str, *, what: str = "run name") -> str:
    """`name` when it can be a folder on Linux, macOS and Windows.

    Raises:
        RunError: other characters than letters, digits, `.`, `_`, `-`; longer than 64; a name Windows keeps for itself;
            only dots, a leading dash, or a trailing dot.
    """
    shown = safe(name, limit=80)
    if not _NAME.fullmatch(name):
        raise RunError(
            f"'{shown}' cannot be a {what}: 1 to {NAME_LIMIT} letters, digits, '.', '_' and '-' are allowed.",
            cure=f"Use for instance '{clean_name(name)}'.",
        )
    if name.split(".", maxsplit=1)[0].lower() in _RESERVED_ON_WINDOWS:
        raise RunError(f"'{shown}' cannot be a {what}: Windows keeps it for a device.", cure="Take another name.")
    if name.startswith("-") or name.endswith("."):
        raise RunError(
            f"'{shown}' cannot be a {what}: it starts with '-' or ends with '.'.",
            cure=f"Use for instance '{clean_name(name)}'.",
        )
    return name


def clean_name(text: str, *, fallback: str = "run", limit: int = NAME_LIMIT) -> str:
    """A name that `check_name` accepts, as near to `text` as can be: `Qwen/Qwen2.5 0.5B` -> `Qwen-Qwen2.5-0.5B`."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", text)[:limit].strip("-.")
    if not name:
        return fallback
    return f"{fallback}-{name}"[:limit].rstrip("-.") if name.split(".")[0].lower() in _RESERVED_ON_WINDOWS else name
