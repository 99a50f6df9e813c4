"""What the data asks for: the task with its columns and labels, and one example of it. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trimtab.job import TaskKind

LANGUAGE_KINDS: tuple[TaskKind, ...] = ("language_modelling", "instruction")
CLASS_KINDS: tuple[TaskKind, ...] = ("classification", "multilabel_classification", "token_classification")
LABELLED_KINDS: tuple[TaskKind, ...] = (*CLASS_KINDS, "regression")
PER_TOKEN_KINDS: tuple[TaskKind, ...] = ("token_classification", *LANGUAGE_KINDS)
"""Tasks with targets at positions; the others have one for each whole text."""
WHOLE_TEXT_KINDS: tuple[TaskKind, ...] = ("classification", "multilabel_classification", "regression")

IGNORED = -100
"""Label of a position that does not count in the loss (the value transformers and torch use)."""


@dataclass(frozen=True)
class TaskSpec:
    """A task made plain: its kind, the columns it reads and the labels it knows."""

    kind: TaskKind
    text_columns: tuple[str, ...]
    label_columns: tuple[str, ...] = ()
    label_names: tuple[str, ...] = ()
    """Classes (classification, multilabel) or tags (token classification), in the order of their ids; else empty."""
    chat_format: str | None = None
    """Instruction tuning: `messages`, `sharegpt`, `alpaca` or `prompt_completion`; else None."""
    reasons: tuple[str, ...] = ()
    """What was inferred and from what, one sentence each, for the user."""


@dataclass(frozen=True)
class Example:
    """One row made ready for the tokenizer. Only the fields of its task are set."""

    row: int
    """Row in `Rows`, so that every message can name file and line."""
    texts: tuple[str, ...] = ()
    """One text, or two for a pair."""
    words: tuple[str, ...] = ()
    """Token classification: the words."""
    messages: tuple[dict[str, str], ...] = ()
    """Instruction tuning: dicts of `role` (system, user, assistant) and `content`, checked for order."""
    target: Any = field(default=None)
    """Class id (int), value (float), 0/1 per class (tuple of float), or tag ids per word (tuple of int)."""
