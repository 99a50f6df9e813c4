"""The truth report on data: what was read, used and dropped, how long it is, what a cut takes, what counts in the loss.

Plain numbers and text; whoever prints it chooses how. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from trimtab.data.encoding import TokenizeOptions
from trimtab.data.reportparts import Split, drop_line, histogram_lines, listing, measure_split, split_lines
from trimtab.data.task import IGNORED, PER_TOKEN_KINDS, TaskSpec
from trimtab.data.tokenstore import TokenDrop, TokenStore
from trimtab.text import safe

_SHOWN_TOKENS = 400
_SHOWN_CHARS = 400


class Drop(Protocol):
    """Rows left out for one reason, as `trimtab.data.examples` counts them."""

    @property
    def reason(self) -> str: ...

    @property
    def count(self) -> int: ...

    @property
    def locations(self) -> Sequence[str]: ...


class _Part(Protocol):
    @property
    def rows(self) -> Sized: ...


class PreparedData(Protocol):
    """What is read of `trimtab.data.examples.Prepared`."""

    @property
    def spec(self) -> TaskSpec: ...

    @property
    def train(self) -> _Part: ...

    @property
    def eval(self) -> _Part | None: ...

    @property
    def dropped(self) -> Sequence[Drop]: ...


@dataclass(frozen=True)
class DataReport:
    """All of it. `to_dict` for JSON, `short_lines` for the start of a training, `lines` for `inspect`."""

    task: str
    reasons: tuple[str, ...]
    """What was inferred and from what."""
    loss_on: str
    """Language tasks: which tokens count and by which template or marker; else empty."""
    label_names: tuple[str, ...]
    rows_read: int
    dropped: tuple[TokenDrop, ...]
    splits: tuple[Split, ...]
    labels_in_one_split: tuple[tuple[str, str], ...]
    """(label, the only split that has it)"""
    first_example: tuple[tuple[str, bool], ...]
    """(text, whether it counts in the loss) of the first training example, token by token."""
    first_target: str
    """Class, classes or value of the first training example; empty for tasks per token."""
    refusals: tuple[str, ...]
    """Why this data cannot be trained on; empty when it can."""

    @property
    def rows_dropped(self) -> int:
        return sum(drop.count for drop in self.dropped)

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, text and numbers alone."""
        facts = asdict(self)
        facts["first_example"] = [{"text": text, "counts": counts} for text, counts in self.first_example]
        facts["labels_in_one_split"] = [{"label": label, "split": split} for label, split in self.labels_in_one_split]
        facts["rows_dropped"] = self.rows_dropped
        return facts

    def short_lines(self) -> list[str]:
        """A few lines of plain text, safe for a terminal."""
        lines = self._task_lines()
        lines += [f"  {safe(self.loss_on)}"] if self.loss_on else []
        lines.append(self._rows_line())
        lines += [f"  dropped {drop_line(drop)}" for drop in self.dropped]
        for split in self.splits:
            lines += split_lines(split)
        lines += self._label_lines()
        lines += self._first_lines()
        lines += [f"Refused: {safe(reason)}" for reason in self.refusals]
        return lines

    def lines(self) -> list[str]:
        """As `short_lines`, with the histogram of lengths of every split at the end."""
        return [*self.short_lines(), *(line for split in self.splits for line in histogram_lines(split))]

    def _task_lines(self) -> list[str]:
        """`Task: classification (text from 'text', label from 'label'; 2 different labels)` and the other reasons."""
        told = [safe(reason) for reason in self.reasons]
        if not told or not told[0].startswith("Task "):
            return [f"Task: {self.task.replace('_', ' ')}", *(f"  {line}" for line in told)]
        name, _, why = told[0].removeprefix("Task ").removesuffix(".").partition(": ")
        return [f"Task: {name} ({why})" if why else f"Task: {name}", *(f"  {line}" for line in told[1:])]

    def _rows_line(self) -> str:
        used = ", ".join(f"{split.examples:,} {split.name}" for split in self.splits)
        return f"Rows: {self.rows_read:,} read, {self.rows_dropped:,} dropped; examples: {used or 'none'}"

    def _label_lines(self) -> list[str]:
        by_split = [
            (name, [label for label, _ in pairs])
            for name, pairs in groupby(sorted(self.labels_in_one_split, key=lambda pair: pair[1]), lambda pair: pair[1])
        ]
        return [
            f"Labels only in {name}: {listing([safe(label, limit=40) for label in some])}" for name, some in by_split
        ]

    def _first_lines(self) -> list[str]:
        if not self.first_example:
            return []
        runs = groupby(self.first_example, lambda pair: pair[1])
        marked = any(counts for _, counts in self.first_example)
        text = "".join(
            f"[[{joined}]]" if counts else joined
            for counts, pairs in runs
            for joined in ["".join(piece for piece, _ in pairs)]
        )
        head = "First example ([[what counts in the loss]])" if marked else "First example"
        target = f" -> {safe(self.first_target, limit=80)}" if self.first_target else ""
        return [f"{head}: {safe(text, limit=_SHOWN_CHARS)}{target}"]


def build_report(
    prepared: PreparedData,
    train: TokenStore,
    evaluation: TokenStore | None,
    tokenizer: Any,
    options: TokenizeOptions,
    *,
    refusals: Sequence[str] = (),
) -> DataReport:
    """The report on prepared data and its stores. `refusals`: what the caller already knows against the data."""
    spec = prepared.spec
    stores = {"train": train} if evaluation is None else {"train": train, "eval": evaluation}
    splits = tuple(measure_split(name, store, spec) for name, store in stores.items())
    drops = [TokenDrop(one.reason, one.count, tuple(one.locations)) for one in prepared.dropped]
    drops += [one for store in stores.values() for one in store.stats.dropped]
    lonely = _labels_in_one_split(splits)
    return DataReport(
        task=spec.kind,
        reasons=spec.reasons,
        loss_on=_loss_on(spec, options),
        label_names=spec.label_names,
        rows_read=_rows_read(prepared),
        dropped=_merged(drops),
        splits=splits,
        labels_in_one_split=lonely,
        first_example=_first_example(train, tokenizer) if len(train) else (),
        first_target=_first_target(train, spec) if len(train) else "",
        refusals=(*refusals, *_refusals(spec, splits, lonely)),
    )


def _rows_read(prepared: PreparedData) -> int:
    """Rows of all files; a split shares the rows of its training data."""
    train, evaluation = prepared.train.rows, prepared.eval.rows if prepared.eval is not None else None
    return len(train) + (len(evaluation) if evaluation is not None and evaluation is not train else 0)


def _loss_on(spec: TaskSpec, options: TokenizeOptions) -> str:
    if spec.kind == "instruction":
        name = options.template.name if options.template is not None else "none"
        return f"loss on {options.loss_on if options.loss_on == 'answers' else 'all tokens'}, chat template: {name}"
    if spec.kind == "language_modelling":
        marker = options.answer_marker
        return "loss on all tokens" if marker is None else f"loss on what follows {marker!r}"
    return ""


def _labels_in_one_split(splits: Sequence[Split]) -> tuple[tuple[str, str], ...]:
    """Labels that only one of two splits has."""
    if len(splits) < 2:
        return ()
    found: list[tuple[str, str]] = []
    for counts in zip(*(split.classes for split in splits), strict=False):
        having = [split.name for split, one in zip(splits, counts, strict=True) if one.count]
        if len(having) == 1:
            found.append((counts[0].name, having[0]))
    return tuple(found)


def _refusals(spec: TaskSpec, splits: Sequence[Split], lonely: Sequence[tuple[str, str]]) -> list[str]:
    found: list[str] = []
    if not splits:
        return found
    train = splits[0]
    if not train.examples:
        found.append("no training example is left")
    elif not train.target_tokens:
        found.append("no training example has a target")
    present = [one for one in train.classes if one.count]
    if spec.kind == "classification" and len(present) < 2 and train.examples:
        only = f" ({present[0].name})" if present else ""
        found.append(f"the training data has {len(present)} of the classes{only}; there must be two or more")
    unknown = [label for label, split in lonely if split != train.name]
    if unknown:
        found.append(f"the evaluation data has labels that the training data lacks: {listing(unknown)}")
    return found


def _merged(drops: Sequence[TokenDrop]) -> tuple[TokenDrop, ...]:
    """Drops of all splits, one per reason, the most frequent first."""
    merged: dict[str, TokenDrop] = {}
    for drop in drops:
        known = merged.get(drop.reason, TokenDrop(drop.reason, 0, ()))
        locations = (known.locations + drop.locations)[:5]
        merged[drop.reason] = TokenDrop(drop.reason, known.count + drop.count, locations)
    return tuple(sorted((drop for drop in merged.values() if drop.count), key=lambda drop: -drop.count))


def _first_example(store: TokenStore, tokenizer: Any) -> tuple[tuple[str, bool], ...]:
    ids = store.input_ids(0)
    counts = np.zeros(len(ids), dtype=np.bool_)
    labels = store.labels(0)
    if isinstance(labels, np.ndarray) and labels.shape == ids.shape and store.spec.kind in PER_TOKEN_KINDS:
        counts = labels != IGNORED
        if store.spec.kind != "token_classification":
            counts[0] = False
    pairs = zip(ids[:_SHOWN_TOKENS].tolist(), counts[:_SHOWN_TOKENS].tolist(), strict=True)
    return tuple(_pieces(list(pairs), tokenizer))


def _pieces(tokens: Sequence[tuple[int, bool]], tokenizer: Any) -> list[tuple[str, bool]]:
    """(text, counts) per token, as what each adds to the text; parts of one character are taken together."""
    pieces: list[tuple[str, bool]] = []
    ids = [token for token, _ in tokens]
    done, before = 0, ""
    for index, (_, counts) in enumerate(tokens, start=1):
        text = _decode(ids[:index], tokenizer)
        open_run = index < len(tokens) and tokens[index][1] == counts
        # A character of UTF-8 has four bytes at most; beyond that the sign belongs to the text itself.
        if text.endswith("\ufffd") and index - done < 4 and open_run:
            continue
        added = text[len(before) :] if text.startswith(before) else _decode(ids[done:index], tokenizer)
        pieces.append((added, counts))
        done, before = index, text
    return pieces


def _decode(ids: list[int], tokenizer: Any) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _first_target(store: TokenStore, spec: TaskSpec) -> str:
    if spec.kind in PER_TOKEN_KINDS:
        return ""
    label = store.labels(0)
    if spec.kind == "regression":
        return f"{label:g}"
    if spec.kind == "multilabel_classification":
        chosen = [name for name, one in zip(spec.label_names, label, strict=False) if one > 0.5]
        return ", ".join(chosen) or "no label"
    return spec.label_names[label] if label < len(spec.label_names) else str(label)
