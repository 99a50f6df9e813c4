"""The commented job file that `trimtab init` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.job import known_keys
from trimtab.jobproblems import section_model
from trimtab.jobyaml import dump_value

_SECTIONS = {
    "model": "What is trained.",
    "data": "What it learns from. Paths start from the folder of this file.",
    "task": "What it shall do.",
    "method": "Which weights train.",
    "training": "How it learns.",
    "machine": "How it is computed. Left alone, this machine is measured; nothing here changes what is learned.",
    "output": "Where it goes.",
}
_WIDTH = 116


def starter_text(values: Mapping[str, Any], notes: Mapping[str, str], *, schema: str = "") -> str:
    """A job file with `values` set and every other key as a comment with its default.

    Args:
        values: dotted key to value.
        notes: dotted key to a sentence on why the value was chosen.
        schema: path of a JSON schema as editors shall find it; empty: none is named.
    """
    lines = [f"# yaml-language-server: $schema={schema}"] if schema else []
    lines += [
        "## A job for Trimtab: `trimtab train` with the name of this file runs it.",
        "## Lines with '##' explain the key below; lines with '#' are keys at their default: remove '# ' to set one.",
    ]
    section = ""
    for key, explanation in known_keys().items():
        name, field = key.split(".")
        if name != section:
            section = name
            lines += ["", f"## {_SECTIONS[name]}", f"{name}:"]
        lines += [f"  ## {line}" for line in _wrapped(explanation)]
        if key in notes:
            lines += [f"  ## {line}" for line in _wrapped(notes[key])]
        if key in values:
            lines.append(f"  {field}: {dump_value(values[key])}")
        else:
            lines.append(f"  # {field}: {dump_value(_default(name, field))}")
    return "\n".join(lines) + "\n"


def _default(section: str, field: str) -> Any:
    info = section_model(section).model_fields[field]
    return None if info.is_required() else info.default


def _wrapped(text: str) -> list[str]:
    """Lines of at most `_WIDTH` characters, broken at blanks."""
    import textwrap

    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
