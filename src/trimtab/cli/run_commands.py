"""`runs`: what was trained here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import JsonFlag
from trimtab.cli.output import guarded, print_json, print_line
from trimtab.text import safe

if TYPE_CHECKING:
    from trimtab.runs import Run


@guarded
def runs(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds the Runs.")] = Path("runs"),
    as_json: JsonFlag = False,
) -> None:
    """List the Runs of a folder, with status and metrics."""
    from trimtab.runs import list_runs

    found = list(list_runs(root))
    if as_json:
        print_json({"root": str(root), "runs": [describe(run) for run in found]})
    elif not found:
        print_line(f"There are no Runs in {root}. `trimtab demo` makes one.")
    else:
        _print_table(found)


def describe(run: Run) -> dict[str, Any]:
    """One Run as plain values."""
    return {
        "run": str(run.path),
        "status": run.status,
        "model": run.job.model.path,
        "data": run.job.data.train,
        "method": run.job.method.kind,
        "metrics": dict(run.metrics or {}),
        "model_path": str(run.model_path) if run.model_path else None,
    }


def _print_table(found: list[Run]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("run", "status", "model", "method", "metrics"):
        table.add_column(heading, overflow="fold")
    for run in found:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in _plain_metrics(run.metrics or {}).items())
        cells = (str(run.path), str(run.status), Path(run.job.model.path).name, run.job.method.kind, metrics)
        table.add_row(*(Text(safe(cell, limit=120)) for cell in cells))
    Console().print(table)


def _plain_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """The first few numbers, which are the task's own."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
    return dict(list(numbers.items())[:3])
