"""What is said when a Run has ended: result, place, and the command that uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.cli.output import print_line
from trimtab.cli.progress import Reporter, metrics_line
from trimtab.text import program, shell_path, shell_word
from trimtab.units import format_seconds

if TYPE_CHECKING:
    from trimtab.runs import Run


def run_document(run: Run, reporter: Reporter) -> dict[str, Any]:
    """The JSON document of `train` and `resume`."""
    return {
        "run": str(run.path),
        "status": run.status,
        "model": str(run.model_path) if run.status == "done" else None,
        "metrics_before": reporter.first_metrics or None,
        "metrics": run.metrics or reporter.metrics,
        "train_seconds": reporter.train_seconds,
        "warnings": reporter.warnings,
    }


def print_summary(run: Run, reporter: Reporter) -> None:
    """Metrics before and after, where the model lies, and what to do with it."""
    took = f" in {format_seconds(reporter.train_seconds)}" if reporter.train_seconds is not None else ""
    print_line(f"Trained{took}.")
    if reporter.first_metrics:
        print_line(f"before: {metrics_line(reporter.first_metrics)}")
    if reporter.metrics:
        print_line(f"after:  {metrics_line(reporter.metrics)}")
    print_line(f"model:  {run.model_path}")
    print_line(f"use it: {use_command(run)}")


def use_command(run: Run, text: str = "some text") -> str:
    """The command that tries the model of a Run."""
    if run.read("task")["kind"] == "instruction":
        return f"{program()} chat {shell_path(run.path)}"
    return f"{program()} predict {shell_path(run.path)} --text {shell_word(text)}"
