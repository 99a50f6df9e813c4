"""`runs`: what was trained here."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import JsonFlag
from trimtab.cli.output import guarded, print_json, print_line
from trimtab.text import safe

if TYPE_CHECKING:
    from trimtab.runs import RunSummary

SHOWN_METRICS = 3


@guarded
def runs(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds the Runs.")] = Path("runs"),
    as_json: JsonFlag = False,
) -> None:
    """List the Runs of a folder, with status and metrics."""
    from trimtab.runs import list_runs

    found = list_runs(root)
    if as_json:
        print_json({"root": str(root), "runs": [describe(run) for run in found]})
    elif not root.is_dir() and root != Path("runs"):
        print_line(f"There is no folder {root}.")
    elif not found:
        print_line(f"There are no Runs in {root}. `trimtab demo` makes one.")
    else:
        _print_table(found)


def describe(run: RunSummary) -> dict[str, Any]:
    """One Run as plain values; `changed` in unix seconds."""
    return {**asdict(run), "path": str(run.path)}


def _print_table(found: list[RunSummary]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "status", "steps", "last change", "metrics"):
        table.add_column(heading, no_wrap=True)
    for run in found:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in list(run.metrics.items())[:SHOWN_METRICS])
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        steps = f"{run.step}/{run.steps}" if run.steps else ""
        cells = (str(run.path), run.status, steps, changed, metrics)
        table.add_row(*(Text(safe(cell, limit=120)) for cell in cells))
    # As wide as it needs: a path that is cut or folded cannot be copied.
    Console(width=Console(width=10_000).measure(table).maximum).print(table, soft_wrap=True)
