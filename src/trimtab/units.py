"""Numbers with units, printed for people and read from what people write. Inside, only bytes and seconds exist."""

from __future__ import annotations

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def format_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`; GiB exist only in what is printed."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """`95` -> `1 min 35 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {left:02d} s" if minutes else f"{left} s"


def format_count(count: float) -> str:
    """`1234567` -> `1.23 M`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(count) >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{count:,.0f}" if float(count).is_integer() else f"{count:.3g}"
