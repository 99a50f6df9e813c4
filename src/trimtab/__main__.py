"""`python -m trimtab`."""

from __future__ import annotations

from trimtab.cli import main

if __name__ == "__main__":
    main()
