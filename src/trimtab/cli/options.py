"""Options that several commands share, and how they become overrides of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from trimtab.errors import JobError
from trimtab.text import safe

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; progress goes to stderr.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job file, e.g. training.epochs=2. Repeat it."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model folder, .gguf file or hub id.")]
DataOption = Annotated[
    list[str] | None, typer.Option("--data", help="File, folder or hub data set to learn from. Repeat it for several.")
]


def read_settings(pairs: Sequence[str] | None) -> dict[str, str]:
    """`["a.b=c"]` as `{"a.b": "c"}`.

    Raises:
        JobError: no `=`, or the same key twice.
    """
    overrides: dict[str, str] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            shown = safe(pair, limit=80)
            raise JobError(f"--set {shown}: a key and a value are needed.", cure="Write --set training.epochs=2.")
        if key in overrides:
            raise JobError(f"--set {safe(key, limit=80)} is given twice.", cure="Remove one of the two.")
        overrides[key] = value
    return overrides


def quote_list(values: Sequence[str]) -> str:
    """One text, or a YAML list of several, read back exactly."""
    from trimtab.jobyaml import dump_value

    return dump_value(values[0] if len(values) == 1 else list(values))


def merge_flags(overrides: dict[str, str], flags: dict[str, str | None]) -> dict[str, str]:
    """Flags as overrides; one that is also given by `--set` is refused."""
    merged = dict(overrides)
    for key, value in flags.items():
        if value is None:
            continue
        if key in merged:
            raise JobError(f"{key} is given by a flag and by --set.", cure="Remove one of the two.")
        merged[key] = value
    return merged
