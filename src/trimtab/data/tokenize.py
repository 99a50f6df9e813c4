"""Examples to a token store: tokenised once, kept by content, refused when nothing is left to learn from.

Imports no torch and no transformers: the tokenizer is passed in.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab.data.encoding import (
    MARKER_ABSENT,
    Encoded,
    Encoder,
    TokenizeOptions,
    backend_of,
    chat_template,
    encode_prompt,
    leading_bos,
)
from trimtab.data.task import Example, TaskSpec
from trimtab.data.tokenstore import (
    FORMAT_VERSION,
    DamagedStoreError,
    StoreWriter,
    TokenDrop,
    Tokens,
    TokenStats,
    TokenStore,
    has_counts,
)
from trimtab.errors import DataError, JobError
from trimtab.text import safe

__all__ = [
    "Encoded",
    "Encoder",
    "TokenDrop",
    "TokenStats",
    "TokenStore",
    "TokenizeOptions",
    "Tokens",
    "chat_template",
    "choose_max_length",
    "encode_prompt",
    "leading_bos",
    "store_key",
    "tokenize",
    "tokenizer_digest",
]

OnProgress = Callable[[int, int], None]
"""Called with (examples done, examples in all)."""

DEFAULT_MOST = {"language_modelling": 2048, "instruction": 2048}
"""Longest example in tokens when the job names none, by task; 512 for the others."""
_BATCH = 1_000
_SHOWN_CHARS = 300


class _Rows(Protocol):
    def location(self, row: int, /) -> str: ...


class ExampleSource(Protocol):
    """What is read of `trimtab.data.examples.Examples`."""

    @property
    def digest(self) -> str: ...

    @property
    def rows(self) -> _Rows: ...

    def __len__(self) -> int: ...

    def batches(self, size: int, /) -> Iterator[Sequence[Example]]: ...


def tokenize(
    examples: ExampleSource,
    spec: TaskSpec,
    tokenizer: Any,
    options: TokenizeOptions,
    *,
    cache_dir: Path,
    on_progress: OnProgress | None = None,
) -> TokenStore:
    """The store of these examples, from `cache_dir` when it is there and whole.

    Raises DataError when no example keeps a target or the cache cannot be written, JobError when `max_length` has no
    room for a token, ModelError for a tokenizer that tells no character positions.
    """
    key = store_key(examples, spec, tokenizer, options)
    folder = Path(cache_dir) / f"tokens-{key[:32]}"
    try:
        store = TokenStore(folder, spec)
    except DamagedStoreError:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        if on_progress is not None:
            on_progress(len(examples), len(examples))
        return store
    encoder = Encoder(spec, tokenizer, options)
    try:
        _write(examples, spec, encoder, options, folder, _Progress(on_progress, len(examples)), key)
        return TokenStore(folder, spec)
    except (OSError, DamagedStoreError) as error:
        raise DataError(
            f"The tokens cannot be kept in {cache_dir}: {error}.", cure="Free space there, or make the folder writable."
        ) from error
    except _NothingLeftError as nothing:
        raise _refusal(nothing, tokenizer, options) from None


class _NothingLeftError(Exception):
    """No example can be trained on."""

    def __init__(self, dropped: Sequence[TokenDrop], first: Encoded | None, text: str) -> None:
        super().__init__("no example is left")
        self.dropped, self.first, self.text = dropped, first, text


class _Progress:
    def __init__(self, report: OnProgress | None, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, count: int) -> None:
        self._done += count
        if self._report is not None:
            self._report(self._done, self._total)


def _write(
    examples: ExampleSource,
    spec: TaskSpec,
    encoder: Encoder,
    options: TokenizeOptions,
    folder: Path,
    progress: _Progress,
    key: str,
) -> None:
    counts = has_counts(spec.kind, marker=options.answer_marker is not None)
    writer = StoreWriter(folder, spec, types=encoder.makes_segments, counts=counts)
    first: tuple[Encoded, str] | None = None
    try:
        for batch in examples.batches(_BATCH):
            for chunk, encoded in encoder.chunks(batch):
                if first is None and encoded:
                    first = encoded[0], _source_text(chunk[0])
                targets = {example.row: example.target for example in chunk}
                writer.add(encoded, [targets[one.row] for one in encoded], examples.rows.location)
                progress.add(len(chunk))
        if not writer.kept:
            raise _NothingLeftError(writer.dropped, *(first or (None, "")))
        writer.finish(key, options.max_length)
    finally:
        writer.close()


def _source_text(example: Example) -> str:
    if example.messages:
        return " | ".join(f"{message['role']}: {message['content']}" for message in example.messages)
    return " | ".join(example.texts) if example.texts else " ".join(example.words)


def _refusal(nothing: _NothingLeftError, tokenizer: Any, options: TokenizeOptions) -> DataError:
    """Why nothing is left, with the first example as it would have been trained on."""
    if not nothing.dropped:
        return DataError("There is no example to tokenise.", cure="Check data.train.")
    main = nothing.dropped[0]
    total = sum(drop.count for drop in nothing.dropped)
    head = f"None of {total:,} examples has anything to learn from; {main.count:,}: {main.reason}"
    first = nothing.first.ids if nothing.first is not None else np.empty(0, dtype=np.int32)
    decoded = tokenizer.decode(first[:200].tolist()) if len(first) else nothing.text
    cure = f"Raise training.max_length (now {options.max_length})."
    if main.reason == MARKER_ABSENT:
        head = f"data.answer_marker {options.answer_marker!r} occurs in none of {total:,} texts"
        decoded, cure = nothing.text, "Set data.answer_marker to what stands before the answers, or leave it out."
    elif "chat template" in main.reason:
        cure = "Set data.template: chatml"
    elif "max_length" not in main.reason:
        cure = "Check the data with: trimtab inspect"
    return DataError(
        f'{head}. The first reads: "{safe(decoded, limit=_SHOWN_CHARS)}".',
        cure=cure,
        location=main.locations[0],
        problems=[f"{drop.count:,} examples: {drop.reason} ({', '.join(drop.locations)})" for drop in nothing.dropped],
    )


def store_key(examples: ExampleSource, spec: TaskSpec, tokenizer: Any, options: TokenizeOptions) -> str:
    """Hash of all that shapes a store; equal keys mean equal tokens."""
    task = {name: value for name, value in asdict(spec).items() if name != "reasons"}
    template = options.template.digest if options.template is not None and spec.kind == "instruction" else None
    marker = options.answer_marker if spec.kind == "language_modelling" else None
    loss_on = options.loss_on if spec.kind == "instruction" else None
    facts = [FORMAT_VERSION, examples.digest, task, tokenizer_digest(tokenizer), template, marker, loss_on]
    return _hash(json.dumps([*facts, options.max_length]))


def tokenizer_digest(tokenizer: Any) -> str:
    """Hash of the tokenizer: vocabulary, rules, added tokens and special tokens."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    names = sorted(tokenizer.model_input_names)
    return _hash(json.dumps([special, names]) + backend_of(tokenizer).to_str())


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def choose_max_length(
    lengths: NDArray[Any] | Sequence[int] | None, model_max: int | None, kind: str, wanted: int | None
) -> tuple[int, str]:
    """(longest example in tokens, why): the job's, or what model and task allow.

    `lengths`: token counts before any cut, or None while they are not known. `model_max`: positions the model has.
    Raises JobError when the job asks for more than that.
    """
    if wanted is not None:
        if model_max is not None and wanted > model_max:
            raise JobError(
                f"training.max_length is {wanted:,}, and the model has {model_max:,} positions.",
                cure=f"Set training.max_length to {model_max} or less.",
            )
        return wanted, "set in the job"
    usual = DEFAULT_MOST.get(kind, 512)
    most = usual if model_max is None else min(usual, model_max)
    task = kind.replace("_", " ")
    limit = f"the model's {most:,} positions" if model_max == most else f"the usual {most:,} for {task}"
    longest = int(max(lengths)) if lengths is not None and len(lengths) else None
    return most, limit if longest is None else f"{limit}; the longest example has {longest:,} tokens"
