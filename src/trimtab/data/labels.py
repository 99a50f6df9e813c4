"""Label values as names: what counts as missing, which names are one, and their order. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MISSING = ("", "nan", "null")


def is_number(name: str) -> bool:
    """Whether a label name reads as a finite number."""
    try:
        return math.isfinite(float(name)) and "_" not in name
    except ValueError:
        return False


def label_name(value: Any, class_names: Sequence[str] = ()) -> str | None:
    """The name of one label value, or None when it is missing (null, NaN, blank, `nan`, `null`, -1 of named classes).

    Blanks around text are stripped; 3 and 3.0 and "3" have one name. `class_names`: names of integer labels by id.

    Raises:
        ValueError: a list or an object, or an id that `class_names` lacks. The message says which.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isnan(value):
            return None
        value = int(value) if value.is_integer() else value
    if isinstance(value, int) and class_names:
        return _named(value, class_names)
    if isinstance(value, (list, tuple, dict)):
        raise ValueError("is a list, one label is expected" if not isinstance(value, dict) else "is an object")
    name = str(value).strip()
    return None if name.casefold() in _MISSING else name


def _named(value: int, class_names: Sequence[str]) -> str | None:
    if value == -1:
        return None
    if not 0 <= value < len(class_names):
        raise ValueError(f"is class {value}, but the file names only {len(class_names)} classes")
    return class_names[value]


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Numbers by value, anything else by code point."""
    listed = list(names)
    if listed and all(is_number(name) for name in listed):
        return tuple(sorted(listed, key=lambda name: (float(name), name)))
    return tuple(sorted(listed))


def number_of(value: Any) -> float | None:
    """A regression target as a float, or None when it is missing.

    Raises:
        ValueError: NaN, infinite, or no number; the message says which.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"is {value!r:.60}, a number is expected")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        comma = isinstance(value, str) and is_number(value.replace(",", "."))
        hint = "; write a point, not a comma" if comma else ""
        raise ValueError(f"is '{value:.60}', a number is expected{hint}") from None
    if not math.isfinite(number):
        raise ValueError(f"is {number}, a finite number is expected")
    return number


def flag_of(value: Any) -> bool | None:
    """A 0/1 label as a bool, or None when it is missing.

    Raises:
        ValueError: neither.
    """
    name = label_name(value)
    if name is None:
        return None
    known = {"0": False, "1": True, "false": False, "true": True}.get(name.casefold())
    if known is None:
        raise ValueError(f"is '{name:.60}', 0 or 1 is expected")
    return known


@dataclass
class LabelBook:
    """Labels met in one split: a code for each name in the order of first sight."""

    codes: dict[str, int] = field(default_factory=dict[str, int])
    stripped: int = 0
    """Values with blanks around the name."""
    has_text_numbers: bool = False
    has_numbers: bool = False

    @property
    def names(self) -> list[str]:
        return list(self.codes)

    @property
    def is_mixed(self) -> bool:
        """Whether some numbers were written as text and some as numbers."""
        return self.has_numbers and self.has_text_numbers

    def code(self, value: Any, class_names: Sequence[str] = ()) -> int | None:
        """The code of a label value, None when it is missing. Raises ValueError as `label_name` does."""
        known = self.codes.get(value) if isinstance(value, str) else None
        if known is not None:
            self.has_text_numbers = self.has_text_numbers or is_number(value)
            return known
        name = label_name(value, class_names)
        if name is None:
            return None
        if isinstance(value, str):
            self.stripped += value != name
            self.has_text_numbers = self.has_text_numbers or is_number(name)
        elif not isinstance(value, bool):
            self.has_numbers = True
        return self.codes.setdefault(name, len(self.codes))
