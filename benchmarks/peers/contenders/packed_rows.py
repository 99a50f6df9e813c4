"""How many packed rows make one step of the same size for the peers that pack."""

from __future__ import annotations

import json
from pathlib import Path


def packed_rows(folder: Path, row_tokens: int) -> int:
    """Rows of `row_tokens` that come nearest to the mean tokens of one step."""
    facts = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    return max(1, round(facts["tokens_per_step"] / row_tokens))
