"""Uses a finished model: labels, values, tags, or text. Batches by a budget of positions, in any length of input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab.data.batches import collate
from trimtab.data.chat import to_messages
from trimtab.data.encoding import Encoded, Encoder
from trimtab.data.groups import MicroBatchLimit, evaluation_parts
from trimtab.data.task import LANGUAGE_KINDS, Example, TaskSpec
from trimtab.data.tokenize import TokenizeOptions
from trimtab.errors import DataError
from trimtab.models.generate import text_generator
from trimtab.models.load import LoadedTokenizer
from trimtab.models.objective import build_objective

Item = str | Mapping[str, Any] | Sequence[str]
"""A text; a row with the columns of the training data; or two texts."""

_READ_AHEAD = 256
"""Inputs taken at once: enough to sort by length, few enough to answer a stream soon."""
_SLOTS = 4096


@dataclass(frozen=True)
class _Encodings:
    """Encoded inputs with placeholder labels, in the form that `collate` reads."""

    spec: TaskSpec
    items: list[Encoded]

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.array([len(item.ids) for item in self.items], dtype=np.int32)

    def input_ids(self, index: int) -> NDArray[np.int32]:
        return self.items[index].ids

    def token_types(self, index: int) -> NDArray[np.int8] | None:
        return self.items[index].types

    def labels(self, index: int) -> Any:
        if self.spec.kind == "token_classification":
            # The encoder was given each word's number, which may be beyond the tags.
            labels = self.items[index].labels
            return None if labels is None else np.minimum(labels, 0)
        if self.spec.kind == "multilabel_classification":
            return np.zeros(len(self.spec.label_names), dtype=np.float32)
        return 0


class Predictor:
    """A finished model, ready to be asked."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: LoadedTokenizer,
        spec: TaskSpec,
        options: TokenizeOptions,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.device = device
        self._tokenizer = tokenizer.tokenizer
        self._pad_id = tokenizer.pad_id
        self._model = model.to(device).eval()
        self._speaks = spec.kind in LANGUAGE_KINDS
        self._generator = text_generator(self._model, self._tokenizer) if self._speaks else None
        self._objective = None
        if not self._speaks:
            self._objective = build_objective(self._model, spec, layout="flat", pad_id=self._pad_id)
            self._encoder = Encoder(spec, self._tokenizer, options)

    def predict(self, items: Iterable[Item]) -> Iterator[dict[str, Any]]:
        """One dict for each item, in order.

        classification: `label`, `probability`, `probabilities`; several labels: `labels`, `probabilities`; regression:
        `value`; token classification: `words`, `tags`; language models: `text`.

        Raises DataError for an item without the column that the model reads.
        """
        left = iter(items)
        start = 0
        while chunk := list(islice(left, 1 if self._speaks else _READ_AHEAD)):
            if self._generator is not None:
                yield {"text": "".join(self._written(_as_messages(chunk[0], self.spec, start)))}
            else:
                yield from self._classify(chunk, start)
            start += len(chunk)

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """The answer to a conversation, piece by piece. A model without a chat template continues the last message."""
        if self._generator is None:
            raise DataError(
                f"this model was trained for {self.spec.kind}, not to talk.", cure="Use trimtab predict for it."
            )
        prompt: Any = list(messages) if self._tokenizer.chat_template else messages[-1]["content"]
        return self._generator.generate_stream(
            prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )

    def _written(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """The answer; a model that was trained on plain text goes on with the text instead."""
        if self.spec.kind == "language_modelling":
            assert self._generator is not None
            return self._generator.generate_stream(messages[-1]["content"])
        return self.chat(messages)

    def _classify(self, chunk: list[Item], start: int) -> Iterator[dict[str, Any]]:
        examples = [_example(item, self.spec, start + at) for at, item in enumerate(chunk)]
        outputs = self._outputs(_Encodings(self.spec, self._encoder.encode(examples)))
        for example, rows in zip(examples, outputs, strict=True):
            yield _ANSWERS[self.spec.kind](rows, example, self.spec)

    def _outputs(self, encodings: _Encodings) -> list[Tensor]:
        """The logits of each example: [classes], [1], or [words, tags]."""
        assert self._objective is not None
        found: dict[int, Tensor] = {}
        layout = self._objective.layout
        for part in evaluation_parts(encodings.lengths, MicroBatchLimit(_SLOTS, layout=layout)):
            batch = collate(encodings, part, layout=layout, pad_id=self._pad_id).to(self.device)
            with torch.inference_mode():
                _, outputs = self._objective.evaluate(batch)
            counts = [encodings.items[index].targets for index in part]
            per_token = self.spec.kind == "token_classification"
            pieces = outputs.cpu().split(counts) if per_token else outputs.cpu().unbind(0)
            found.update(zip(part.tolist(), pieces, strict=True))
        return [found[index] for index in range(len(encodings.items))]


def _class_answer(logits: Tensor, example: Example, spec: TaskSpec) -> dict[str, Any]:
    del example
    shares = logits.softmax(-1).tolist()
    best = int(logits.argmax())
    probabilities = dict(zip(spec.label_names, shares, strict=True))
    return {"label": spec.label_names[best], "probability": shares[best], "probabilities": probabilities}


def _labels_answer(logits: Tensor, example: Example, spec: TaskSpec) -> dict[str, Any]:
    del example
    shares = dict(zip(spec.label_names, logits.sigmoid().tolist(), strict=True))
    return {"labels": [name for name, share in shares.items() if share >= 0.5], "probabilities": shares}


def _value_answer(value: Tensor, example: Example, spec: TaskSpec) -> dict[str, Any]:
    del example, spec
    return {"value": float(value)}


def _tags_answer(logits: Tensor, example: Example, spec: TaskSpec) -> dict[str, Any]:
    """Words beyond the longest input get no tag, and say so with None."""
    tags: list[str | None] = [spec.label_names[best] for best in logits.argmax(-1).tolist()]
    tags += [None] * (len(example.words) - len(tags))
    return {"words": list(example.words), "tags": tags}


_ANSWERS = {
    "classification": _class_answer,
    "multilabel_classification": _labels_answer,
    "regression": _value_answer,
    "token_classification": _tags_answer,
}


def _example(item: Item, spec: TaskSpec, number: int) -> Example:
    """An input as an example; `row` is its place in the input."""
    if spec.kind == "token_classification":
        return _word_example(item, spec, number)
    if isinstance(item, str):
        texts: tuple[Any, ...] = (item,)
    elif isinstance(item, Mapping):
        texts = tuple(_column(item, name, number) for name in spec.text_columns)
    else:
        texts = tuple(item)
    if len(texts) != len(spec.text_columns) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"input {number + 1} does not give {len(spec.text_columns)} text(s), as the training data did "
            f"({', '.join(spec.text_columns)}).",
            cure="Give JSON lines or CSV with these columns.",
        )
    return Example(row=number, texts=texts)


def _word_example(item: Item, spec: TaskSpec, number: int) -> Example:
    if isinstance(item, str):
        words: Sequence[Any] = item.split()
    elif isinstance(item, Mapping):
        value = _column(item, spec.text_columns[0], number)
        words = value.split() if isinstance(value, str) else value
    else:
        words = item
    checked = tuple(str(word) for word in words)
    # Each word's number stands for its tag, so that the encoding tells which token begins which word.
    return Example(row=number, words=checked, target=tuple(range(len(checked))))


def _column(item: Mapping[str, Any], name: str, number: int) -> Any:
    if name in item:
        return item[name]
    if len(item) == 1 and name == "text":
        return next(iter(item.values()))
    raise DataError(
        f"input {number + 1} has no column {name!r}; it has {', '.join(map(str, item)) or 'none'}.",
        cure="Name the columns as in the training data.",
    )


def _as_messages(item: Item, spec: TaskSpec, number: int) -> list[dict[str, str]]:
    if isinstance(item, str):
        return [{"role": "user", "content": item}]
    if isinstance(item, Mapping):
        if "messages" in item:
            return _unanswered(_checked_messages(item["messages"], number))
        if "conversations" in item or {"instruction", "input"} <= item.keys():
            return _conversation(item, number)
        for name in ("prompt", "instruction", "text", "question", *spec.text_columns):
            if isinstance(item.get(name), str):
                return [{"role": "user", "content": item[name]}]
    raise DataError(
        f"input {number + 1} has neither `messages` nor a `prompt`, `instruction` or `text`.",
        cure="Name one of these columns.",
    )


def _unanswered(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation up to its last question: an answer that is there already is what the model shall write."""
    end = len(messages)
    while end > 1 and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def _conversation(row: Mapping[str, Any], number: int) -> list[dict[str, str]]:
    """A sharegpt or alpaca row as in training, up to the answer, which may be missing."""
    turns = row.get("conversations")
    if isinstance(turns, list):
        answered = [*turns, {"role": "assistant", "content": "-"}]
        tries = [("sharegpt", {**row, "conversations": answered}), ("sharegpt", dict(row))]
    else:
        tries = [("sharegpt" if "conversations" in row else "alpaca", {**row, "output": "-"})]
    reason = ""
    for fmt, whole in tries:
        try:
            return to_messages(whole, fmt)[:-1]
        except ValueError as error:
            reason = str(error)
    raise DataError(f"input {number + 1}: {reason}.", cure="Write it as in the training data.")


def _checked_messages(messages: Any, number: int) -> list[dict[str, str]]:
    """Raises DataError for what no chat template could lay out."""
    whole = isinstance(messages, list) and all(
        isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not whole or not messages:
        raise DataError(
            f"`messages` of input {number + 1} is no list of messages with a role and a content.",
            cure='Write {"messages": [{"role": "user", "content": "..."}]}.',
        )
    return messages
