"""Examples as token ids with their targets, cut to a length. Takes a fast tokenizer object and imports none.

The tokenizer's own truncation is never used: it tells neither how long a text was nor which targets a cut lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trimtab.data.rendering import ChatTemplate, Message, load_template, render
from trimtab.data.task import IGNORED, PER_TOKEN_KINDS, Example, TaskSpec
from trimtab.errors import JobError, ModelError

Ids = NDArray[np.int32]

CHUNK_CHARS = 1_000_000
"""Characters tokenised at once: an encoding takes about 40 bytes a character while it lives."""


@dataclass(frozen=True)
class TokenizeOptions:
    """What shapes the tokens beside the data and the tokenizer."""

    max_length: int
    """Longest example in tokens, special tokens included."""
    template: ChatTemplate | None = None
    """Instruction tuning: how a conversation becomes text."""
    answer_marker: str | None = None
    """Language modelling: only what follows the first of these in a text counts."""
    loss_on: Literal["answers", "all"] = "answers"
    """Instruction tuning: which tokens count."""


@dataclass(frozen=True)
class Encoded:
    """One example as tokens, or why it gives none."""

    row: int
    ids: Ids
    """[length] int32."""
    types: NDArray[np.int8] | None = None
    """[length] int8 segment of each token, for tokenizers that make segments."""
    labels: Ids | None = None
    """Per-token tasks: [length] int32 aligned with `ids` (not shifted), IGNORED where nothing counts."""
    original_length: int = 0
    """Tokens before the cut."""
    targets: int = 1
    """Targets that count; 1 for tasks on whole texts."""
    targets_lost: int = 0
    """Targets that the cut removed, or whose word gives no token."""
    reason: str = ""
    """Why it cannot be trained on; empty when it can."""


class Encoder:
    """Encodes the examples of one task with one tokenizer. Raises ModelError for a tokenizer without offsets."""

    def __init__(self, spec: TaskSpec, tokenizer: Any, options: TokenizeOptions) -> None:
        self._spec, self._options = spec, options
        self._backend = backend_of(tokenizer)
        self._bos = leading_bos(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id
        pair = spec.kind not in PER_TOKEN_KINDS and len(spec.text_columns) > 1
        self.makes_segments = pair and "token_type_ids" in tokenizer.model_input_names
        """Whether examples have `types`: one text is a single segment, which every model assumes by itself."""
        kinds: dict[str, Callable[[Sequence[Example]], list[Encoded]]] = {
            "token_classification": self._tagged,
            "language_modelling": self._marked if options.answer_marker is not None else self._documents,
            "instruction": self._conversations,
        }
        self._encode = kinds.get(spec.kind, self._whole_texts)
        specials = len(self._backend.encode("", "" if pair else None, add_special_tokens=True).ids)
        if options.max_length <= specials:
            raise JobError(
                f"training.max_length is {options.max_length}; the tokenizer's special tokens alone take {specials}.",
                cure=f"Set training.max_length to {specials + 1} or more.",
            )

    def encode(self, examples: Sequence[Example]) -> list[Encoded]:
        """Encoded examples in order; a long document of language modelling gives several.

        To tokenise words for inference, pass each word's index as its target: `labels` then says which token begins
        which word.
        """
        return [one for _, encoded in self.chunks(examples) for one in encoded]

    def chunks(self, examples: Sequence[Example]) -> Iterator[tuple[list[Example], list[Encoded]]]:
        """The same in runs of examples short enough that their encodings take little memory."""
        for chunk in _chunks(examples):
            yield chunk, self._encode(chunk)

    def _encodings(self, texts: Sequence[Any], *, offsets: bool, special: bool = True) -> list[Any]:
        encode = self._backend.encode_batch if offsets else self._backend.encode_batch_fast
        return encode(texts, add_special_tokens=special)

    def _whole_texts(self, examples: Sequence[Example]) -> list[Encoded]:
        texts = [example.texts[0] if len(example.texts) == 1 else example.texts[:2] for example in examples]
        encodings = self._encodings(texts, offsets=False)
        return [self._whole_text(example.row, encoding) for example, encoding in zip(examples, encodings, strict=True)]

    def _whole_text(self, row: int, encoding: Any) -> Encoded:
        ids = np.array(encoding.ids, dtype=np.int32)
        types = np.array(encoding.type_ids, dtype=np.int8) if self.makes_segments else None
        length = len(ids)
        if not length:
            return Encoded(row, ids, reason="the tokenizer makes no token of it")
        if length > self._options.max_length:
            kept = longest_first(encoding.sequence_ids, self._options.max_length)
            ids, types = ids[kept], types[kept] if types is not None else None
        return Encoded(row, ids, types, original_length=length)

    def _tagged(self, examples: Sequence[Example]) -> list[Encoded]:
        encodings = self._encodings([" ".join(example.words) for example in examples], offsets=True)
        return [self._tagged_one(example, encoding) for example, encoding in zip(examples, encodings, strict=True)]

    def _tagged_one(self, example: Example, encoding: Any) -> Encoded:
        """The first token of each word carries its tag. The words are joined by blanks, as a model has met text."""
        ids = np.array(encoding.ids, dtype=np.int32)
        length = len(ids)
        labels = np.full(length, IGNORED, dtype=np.int32)
        firsts = first_tokens(example.words, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2))
        tags = np.asarray(example.target if example.target is not None else [IGNORED] * len(firsts), dtype=np.int32)
        labels[firsts[firsts >= 0]] = tags[firsts >= 0]
        if length > self._options.max_length:
            kept = longest_first(encoding.sequence_ids, self._options.max_length)
            ids, labels = ids[kept], labels[kept]
        targets = int((labels != IGNORED).sum())
        lost = int((tags != IGNORED).sum()) - targets
        reason = "" if targets else TAGS_CUT
        return Encoded(example.row, ids, None, labels, length, targets, lost, reason)

    def _documents(self, examples: Sequence[Example]) -> list[Encoded]:
        done: list[Encoded] = []
        for example, encoding in zip(examples, self._encodings(_texts(examples), offsets=False), strict=True):
            ids = self._with_eos(np.array(encoding.ids, dtype=np.int32))
            done += [self._piece(example.row, piece) for piece in _pieces(ids, self._options.max_length)]
        return done

    def _piece(self, row: int, ids: Ids) -> Encoded:
        targets = max(len(ids) - 1, 0)
        reason = "" if targets else "it has one token at most, and the first is nobody's target"
        return Encoded(row, ids, None, ids, len(ids), targets, 0, reason)

    def _marked(self, examples: Sequence[Example]) -> list[Encoded]:
        marker = self._options.answer_marker or ""
        done: list[Encoded] = []
        for example, encoding in zip(examples, self._encodings(_texts(examples), offsets=True), strict=True):
            at = example.texts[0].find(marker)
            starts = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
            # A token that begins inside the marker belongs to it. Special tokens start at 0, where a marker ends never.
            counts = starts >= at + len(marker) if at >= 0 else np.zeros(len(starts), dtype=np.bool_)
            ids = np.array(encoding.ids, dtype=np.int32)
            closed = self._with_eos(ids)
            counts = np.append(counts, np.ones(len(closed) - len(ids), dtype=np.bool_) & (at >= 0))
            done.append(self._counted(example.row, closed, counts, "" if at >= 0 else MARKER_ABSENT))
        return done

    def _conversations(self, examples: Sequence[Example]) -> list[Encoded]:
        template = self._options.template
        assert template is not None, "instruction tuning needs a template"
        done: list[Encoded | None] = []
        texts: list[str] = []
        spans: list[tuple[Example, tuple[tuple[int, int], ...], bool]] = []
        for example in examples:
            try:
                rendered = render(example.messages, template)
            except ValueError as error:
                done.append(Encoded(example.row, np.empty(0, dtype=np.int32), targets=0, reason=str(error)))
                continue
            done.append(None)
            texts.append(rendered.text)
            spans.append((example, rendered.answers, rendered.closed))
        encodings = self._encodings(texts, offsets=True, special=False)
        encoded = iter([self._conversation(*span, encoding) for span, encoding in zip(spans, encodings, strict=True)])
        return [one if one is not None else next(encoded) for one in done]

    def _conversation(
        self, example: Example, answers: tuple[tuple[int, int], ...], closed: bool, encoding: Any
    ) -> Encoded:
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        counts = np.zeros(len(ids), dtype=np.bool_)
        for start, end in answers:
            counts |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
        if self._options.loss_on == "all":
            counts[:] = True
        if not closed and self._eos is not None:
            ids, counts = np.append(ids, np.int32(self._eos)), np.append(counts, np.True_)
        if self._bos is not None:
            if not len(ids) or ids[0] != self._bos:
                ids, counts = np.insert(ids, 0, self._bos), np.insert(counts, 0, False)
            counts[0] = False
        return self._counted(example.row, ids, counts, "")

    def _counted(self, row: int, ids: Ids, counts: NDArray[np.bool_], reason: str) -> Encoded:
        """An example of a language task cut at its end; `counts` [length] says which tokens are targets."""
        length, most = len(ids), self._options.max_length
        labels = np.where(counts, ids, np.int32(IGNORED)).astype(np.int32)
        before = int(counts[1:].sum())
        targets = int(counts[1:most].sum())
        if not reason and not targets:
            reason = TARGETS_CUT if before else "it has no target"
        return Encoded(row, ids[:most], None, labels[:most], length, targets, before - targets, reason)

    def _with_eos(self, ids: Ids) -> Ids:
        if self._eos is None or (len(ids) and ids[-1] == self._eos):
            return ids
        return np.append(ids, np.int32(self._eos))


TARGETS_CUT = "no target is left within max_length"
TAGS_CUT = "no tagged word is left within max_length"
LOST_BY_CUT = (TARGETS_CUT, TAGS_CUT)
"""Reasons of examples that lost every target to the cut."""
MARKER_ABSENT = "data.answer_marker does not occur in it"


def _texts(examples: Sequence[Example]) -> list[str]:
    return [example.texts[0] for example in examples]


def _chunks(examples: Sequence[Example]) -> list[list[Example]]:
    """Examples in runs of about CHUNK_CHARS characters."""
    chunks: list[list[Example]] = []
    size = CHUNK_CHARS
    for example in examples:
        if size >= CHUNK_CHARS:
            chunks.append([])
            size = 0
        chunks[-1].append(example)
        size += sum(map(len, example.texts)) + sum(map(len, example.words))
        size += sum(len(message["content"]) for message in example.messages) + 8
    return chunks


def _pieces(ids: Ids, most: int) -> list[Ids]:
    """Consecutive pieces of at most `most` tokens; the last is never a single token, which would predict nothing."""
    cuts = list(range(0, len(ids), most)) or [0]
    if len(cuts) > 1 and len(ids) - cuts[-1] == 1 and most > 2:
        cuts[-1] -= 1
    return [ids[start:end] for start, end in pairwise([*cuts, len(ids)])]


def longest_first(sequence_ids: Sequence[int | None], most: int) -> NDArray[np.int64]:
    """Positions that stay when the longer text of a pair is cut first; special tokens (None) all stay.

    As the tokenizers library does it: the longer one keeps the odd token.
    """
    sequences = np.array([-1 if one is None else one for one in sequence_ids], dtype=np.int64)
    first, second = int((sequences == 0).sum()), int((sequences == 1).sum())
    room = most - int((sequences == -1).sum())
    short = min(first, second)
    small = min(short, room // 2) if first + second > room else short
    large = room - small
    keep_first, keep_second = (small, large) if first <= second and second else (large, small)
    kept = sequences == -1
    for number, count in ((0, keep_first), (1, keep_second)):
        places = np.flatnonzero(sequences == number)
        kept[places[: max(count, 0)]] = True
    return np.flatnonzero(kept)


def first_tokens(words: Sequence[str], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[words] position of the first token of each word in the text of the words joined by blanks; -1 where none is.

    `offsets` [length, 2]: characters of each token. A token that reaches over two words belongs to the first.
    """
    sizes = np.array([len(word) for word in words], dtype=np.int64)
    ends = np.cumsum(sizes + 1) - 1
    starts = ends - sizes
    places = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    if not len(places) or not len(words):
        return np.full(len(words), -1, dtype=np.int64)
    candidates = np.searchsorted(offsets[places, 1], starts, side="right")
    inside = candidates < len(places)
    firsts = np.where(inside, places[np.minimum(candidates, len(places) - 1)], -1)
    firsts[inside & (offsets[firsts, 0] >= ends)] = -1
    known, index = np.unique(firsts, return_index=True)
    taken = np.full(len(words), -1, dtype=np.int64)
    taken[index[known >= 0]] = known[known >= 0]
    return taken


def backend_of(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside a fast tokenizer, its own truncation and padding turned off.

    Raises ModelError when there is none.
    """
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer {type(tokenizer).__name__} is written in Python and tells no character positions.",
            cure="Use a model whose folder has a tokenizer.json.",
        )
    backend = tokenizer.backend_tokenizer
    # Both are often stored in tokenizer.json; transformers sets them at every call as well.
    backend.no_truncation()
    backend.no_padding()
    return backend


def leading_bos(tokenizer: Any) -> int | None:
    """The id that the tokenizer itself puts before every text, when that is its BOS; else None."""
    backend = backend_of(tokenizer)
    bos = tokenizer.bos_token_id
    with_specials, bare = (backend.encode("a", add_special_tokens=special).ids for special in (True, False))
    return bos if bos is not None and with_specials[:1] == [bos] and bare[:1] != [bos] else None


def chat_template(choice: str | None, tokenizer: Any) -> ChatTemplate:
    """The template that the job chooses (None: the tokenizer's own) with this tokenizer's special tokens.

    Raises DataError when there is none or it cannot be used.
    """
    adds_bos = leading_bos(tokenizer) is not None
    return load_template(choice, tokenizer.chat_template, tokenizer.special_tokens_map, adds_bos=adds_bos)


def encode_prompt(messages: Sequence[Message], template: ChatTemplate, tokenizer: Any) -> list[int]:
    """Token ids of a conversation that waits for an answer, exactly as its beginning was trained on.

    Raises ValueError with a plain reason when the template refuses it.
    """
    text = template.text(messages, add_generation_prompt=True)
    ids: list[int] = backend_of(tokenizer).encode(text, add_special_tokens=False).ids
    bos = leading_bos(tokenizer)
    return [bos, *ids] if bos is not None and ids[:1] != [bos] else ids
