"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `trimtab` and `python -m trimtab`; leaves through SystemExit."""
    from trimtab.cli.app import run

    run(arguments)
