"""Writes text with a causal language model, piece by piece, for chat and the demo."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.data.encoding import chat_template, encode_prompt
from trimtab.data.rendering import ChatTemplate
from trimtab.errors import ModelError

REPLACEMENT = "\ufffd"
_PROBE = "sentinel-7f3a"


@dataclass(frozen=True)
class Stops:
    """What ends an answer."""

    ids: frozenset[int]
    text: str = ""
    """What the chat template puts after an answer, where that is not one token; else empty."""


class TextGenerator:
    """Holds a model, its tokenizer and what ends an answer."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._template = chat_template(None, tokenizer) if tokenizer.chat_template else None
        self.stops = find_stops(model, tokenizer, self._template)
        self.max_positions = _positions(model)
        known = inspect.signature(model.forward).parameters
        self._keeps_one = "logits_to_keep" in known
        # Its name changed within transformers 5.
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    def generate_stream(
        self,
        prompt: str | Sequence[dict[str, str]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Pieces of the answer to a text, or to messages (dicts of `role` and `content`) by the chat template.

        A piece never ends inside a character. `temperature` 0 takes the likeliest token each time; above it, tokens are
        drawn with a generator of its own, seeded by `seed`.

        Raises:
            ModelError: messages without a chat template; a prompt longer than the model's positions.
        """
        ids = self._encode(prompt)
        room = max_new_tokens if self.max_positions is None else min(max_new_tokens, self.max_positions - len(ids))
        if room <= 0:
            raise ModelError(
                f"The conversation has {len(ids):,} tokens; the model has {self.max_positions:,} positions.",
                cure="Start anew with /reset, or shorten the text.",
            )
        return self._pieces(self._tokens(ids, room, temperature, seed))

    def generate(self, prompt: str | Sequence[dict[str, str]], **options: Any) -> str:
        """The whole answer; options as in `generate_stream`."""
        return "".join(self.generate_stream(prompt, **options))

    def _encode(self, prompt: str | Sequence[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt)["input_ids"]
            # Some tokenizers end every text with EOS, after which there is nothing to write.
            ids = ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids
        elif self._template is None:
            raise ModelError(
                "The tokenizer has no chat template, so a conversation cannot be laid out.",
                cure="Train with `data.template: chatml`, or give the prompt as text.",
            )
        else:
            ids = _conversation_ids(prompt, self._template, self.tokenizer)
        if not ids:
            start = self.tokenizer.bos_token_id
            ids = [self.tokenizer.eos_token_id if start is None else start]
        return list(ids)

    def _tokens(self, ids: list[int], room: int, temperature: float, seed: int) -> Iterator[int]:
        device = next(self.model.parameters()).device
        source = torch.Generator().manual_seed(seed)
        was_training = self.model.training
        self.model.eval()
        try:
            fed, cache = torch.tensor([ids], device=device), None
            everything = fed
            for _ in range(room):
                logits, cache = self._step(fed, cache)
                token = _choose(logits, temperature, source)
                if token in self.stops.ids:
                    return
                yield token
                fed = torch.tensor([[token]], device=device)
                everything = torch.cat([everything, fed], dim=1)
                if cache is None:
                    fed = everything
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def _step(self, fed: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits [vocabulary] after the last position, on the CPU in float32, and the cache (None: it has none)."""
        options: dict[str, Any] = {self._cache_name: cache} if cache is not None else {}
        if self._keeps_one:
            options["logits_to_keep"] = 1
        out = self.model(input_ids=fed, use_cache=True, **options)
        return out.logits[0, -1].float().cpu(), out.get(self._cache_name)

    def _pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        """Decoded text as it becomes certain: whole characters, and nothing that may be the start of a stop text."""
        answer: list[int] = []
        sent = 0
        for token in tokens:
            answer.append(token)
            text = self._decode(answer)
            if self.stops.text and self.stops.text in text:
                text = text[: text.index(self.stops.text)]
                if len(text) > sent:
                    yield text[sent:]
                return
            certain = len(text) - _uncertain(text, self.stops.text)
            if certain > sent:
                yield text[sent:certain]
                sent = certain
        # A limit may fall inside a character, whose first bytes say nothing.
        rest = self._decode(answer).rstrip(REPLACEMENT)[sent:] if answer else ""
        if rest:
            yield rest

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def text_generator(model: nn.Module, tokenizer: Any) -> TextGenerator:
    """A generator for a causal language model with its tokenizer (the tokenizer itself, not `LoadedTokenizer`)."""
    return TextGenerator(model, tokenizer)


def _conversation_ids(messages: Sequence[dict[str, str]], template: ChatTemplate, tokenizer: Any) -> list[int]:
    """As training laid conversations out, in the same sandbox: a template is a program of whoever made the model."""
    try:
        return encode_prompt(messages, template, tokenizer)
    except ValueError as error:
        raise ModelError(f"The conversation cannot be laid out: {error}.", cure="Start anew with /reset.") from error


def _uncertain(text: str, stop: str) -> int:
    """How many characters at the end may still change, or may be the start of `stop`."""
    broken = len(text) - len(text.rstrip(REPLACEMENT))
    if broken:
        return broken
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _choose(logits: Tensor, temperature: float, source: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=source))


def find_stops(model: nn.Module, tokenizer: Any, template: ChatTemplate | None) -> Stops:
    """EOS of the tokenizer and of the generation config, and what the template puts after an answer."""
    ids = {tokenizer.eos_token_id}
    for config in (vars(model).get("generation_config"), vars(model).get("config")):
        ends = config.to_dict().get("eos_token_id") if config is not None else None
        ids.update(ends if isinstance(ends, list) else [ends])
    text = _after_answer(template)
    if text:
        pieces = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(pieces) == 1:
            ids.add(pieces[0])
            text = ""
    return Stops(ids=frozenset(i for i in ids if isinstance(i, int)), text=text)


def _after_answer(template: ChatTemplate | None) -> str:
    """The text behind an answer in the chat template, blanks taken off; empty without template."""
    if template is None:
        return ""
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    try:
        rendered = template.text(messages, add_generation_prompt=False)
    except ValueError:  # a template may refuse anything; EOS remains
        return ""
    return rendered.rpartition(_PROBE)[2].strip() if _PROBE in rendered else ""


def _positions(model: nn.Module) -> int | None:
    config = vars(model).get("config")
    settings = config.to_dict() if config is not None else {}
    found = settings.get("max_position_embeddings") or settings.get("n_positions")
    return found if isinstance(found, int) else None
