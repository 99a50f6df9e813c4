"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys

from trimtab.errors import EXIT_INTERRUPTED


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `trimtab` and `python -m trimtab`; leaves through SystemExit."""
    try:
        from trimtab.cli.app import run

        run(arguments)
    except KeyboardInterrupt:  # while modules load or words are parsed; commands see to it themselves
        sys.stderr.write("error: interrupted.\n")
        raise SystemExit(EXIT_INTERRUPTED) from None
