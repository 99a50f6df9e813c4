"""Conversations as text through a chat template, with the exact place of every answer.

A template says nowhere where an answer begins and ends. It is found in this order: by the template's own
`{% generation %}` blocks; by rendering the conversation up to the answer and past it, when each is the beginning of
the next; by putting a sentinel in the place of the answer. Only what is proven against the full text is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from trimtab.data.sandbox import GENERATION_END, GENERATION_START, BadTemplateError, SafeTemplate
from trimtab.errors import DataError, did_you_mean

Message = Mapping[str, str]

SHIPPED = ("chatml", "alpaca", "plain")

_MARKS = {ord(GENERATION_START): None, ord(GENERATION_END): None}


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Characters [start, end) of each answer that is not blank, with the end-of-turn that follows it."""
    closed: bool
    """Whether an end-of-turn follows the last answer; without one the tokenizer's EOS has to stop the model."""


@dataclass(frozen=True)
class _Frame:
    """What a template puts around the contents of a conversation with certain roles."""

    pieces: tuple[str, ...]
    """Text before the first content, between the contents, and after the last: one more than messages."""
    before: tuple[int, ...]
    """Per message: characters in front of the content that belong to the answer (0 for other roles)."""
    after: tuple[int, ...]
    """Per message: characters behind the content that belong to the answer: the end-of-turn."""


@dataclass
class ChatTemplate:
    """A chat template with the special tokens that it may write."""

    name: str
    """`chatml`, `alpaca`, `plain`, `tokenizer`, or the file."""
    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """`bos_token`, `eos_token` and the like, as the template sees them."""
    _frames: dict[tuple[str, ...], _Frame | None] = field(default_factory=dict[tuple[str, ...], "_Frame | None"])

    @cached_property
    def compiled(self) -> SafeTemplate:
        try:
            return SafeTemplate(self.source)
        except BadTemplateError as error:
            raise DataError(
                f"The chat template '{self.name}' cannot be used: {error}.",
                cure="Choose another: data.template: chatml",
            ) from error

    @property
    def digest(self) -> str:
        """Hash of everything that shapes the text."""
        facts = json.dumps([self.source, dict(self.special_tokens)], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    def text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The conversation as text; with `add_generation_prompt` it ends where an answer is due.

        Raises ValueError with a plain reason.
        """
        return self.marked(messages, add_generation_prompt=add_generation_prompt).translate(_MARKS)

    def marked(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """As `text`, with marks where the template has `{% generation %}`."""
        try:
            return self.compiled.render(messages, self.special_tokens, add_generation_prompt=add_generation_prompt)
        except BadTemplateError as error:
            raise ValueError(f"the chat template '{self.name}': {error}") from error

    def frame(self, roles: tuple[str, ...]) -> _Frame | None:
        """The frame for conversations with these roles, found once; None when the template has no fixed one."""
        if roles not in self._frames:
            if len(self._frames) > 2_000:
                self._frames.clear()
            try:
                self._frames[roles] = _find_frame(self, roles)
            except ValueError:
                self._frames[roles] = None
        return self._frames[roles]


def load_template(
    choice: str | None,
    tokenizer_template: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, Any],
    *,
    adds_bos: bool = False,
) -> ChatTemplate:
    """The template the job asks for: a shipped one by name, a Jinja file, or (None) the tokenizer's own.

    `special_tokens` is the tokenizer's `special_tokens_map`. `adds_bos`: the tokenizer begins texts with its BOS, so a
    shipped template writes it, and any other tool that uses the exported template then sees the same tokens.
    `trimtab.data.tokenize.chat_template` takes all of it from a tokenizer.
    """
    tokens = {name: str(token) for name, token in special_tokens.items() if token and not isinstance(token, list)}
    if choice is None:
        template = ChatTemplate("tokenizer", _own_source(tokenizer_template), tokens)
    elif choice in SHIPPED:
        source = (files("trimtab.data") / "templates" / f"{choice}.jinja").read_text(encoding="utf-8")
        template = ChatTemplate(choice, f"{{{{- bos_token -}}}}\n{source}" if adds_bos else source, tokens)
    else:
        template = ChatTemplate(choice, _file_source(choice), tokens)
    _ = template.compiled
    return template


def _own_source(template: str | Mapping[str, str] | None) -> str:
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise DataError("The tokenizer has no chat template, and the job names none.", cure="Set data.template: chatml")
    return template


def _file_source(choice: str) -> str:
    path = Path(choice)
    if not path.is_file():
        raise DataError(
            f"data.template: '{choice}' is neither a shipped template nor a file. {did_you_mean(choice, SHIPPED)}",
            cure="Set data.template: chatml, or the path of a Jinja file.",
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"The chat template cannot be read: {error}.", location=choice, cure="Save it as UTF-8 text."
        ) from error


def render(messages: Sequence[Message], template: ChatTemplate) -> Rendered:
    """The conversation as text with the place of its answers.

    `messages` are in order as `trimtab.data.chat.to_messages` makes them. Raises ValueError with a plain reason when
    the template refuses them or an answer cannot be found for certain.
    """
    messages = [_without_marks(message) for message in messages]
    marked = template.marked(messages)
    if not template.compiled.has_generation:
        return _by_text(messages, marked, template)
    rendered = _by_marks(marked)
    last = rendered.text[slice(*rendered.answers[-1])].rstrip()
    if not last.endswith(messages[-1]["content"].strip()):
        return rendered
    # The block encloses the bare content: the end-of-turn behind it has to be found as without a block.
    found = _by_text(messages, rendered.text, template)
    if len(found.answers) != len(rendered.answers):
        return rendered
    spans = zip(rendered.answers, found.answers, strict=True)
    return Rendered(found.text, tuple((marks[0], max(marks[1], text[1])) for marks, text in spans), found.closed)


def _by_text(messages: Sequence[Message], text: str, template: ChatTemplate) -> Rendered:
    frame = template.frame(tuple(message["role"] for message in messages))
    rendered = _by_frame(messages, text, frame) if frame is not None else None
    return rendered or _one_by_one(messages, text, template)


def _without_marks(message: Message) -> Message:
    content = message["content"]
    if GENERATION_START in content or GENERATION_END in content:
        return {"role": message["role"], "content": content.translate(_MARKS)}
    return message


def _by_marks(marked: str) -> Rendered:
    """Spans from `{% generation %}` marks. Whitespace after a last mark does not make the answer open."""
    texts: list[str] = []
    answers: list[tuple[int, int]] = []
    length = 0
    for number, part in enumerate(marked.split(GENERATION_START)):
        inside, found, outside = part.partition(GENERATION_END) if number else ("", "", part)
        if number and not found:
            raise ValueError("the chat template nests {% generation %} blocks")
        if inside.strip():
            answers.append((length, length + len(inside)))
        texts += [inside, outside]
        length += len(inside) + len(outside)
    if not answers:
        raise ValueError("the chat template marks no answer with {% generation %}")
    # What the block encloses is what the author wants produced, the end-of-turn with it.
    return Rendered("".join(texts), tuple(answers), closed=True)


def _by_frame(messages: Sequence[Message], text: str, frame: _Frame) -> Rendered | None:
    """Spans if the text is exactly the frame filled with the contents (as they are, or stripped), else None."""
    for strip_answers, strip_others in ((False, False), (True, True), (True, False), (False, True)):
        contents = [_stripped(m, strip_answers if m["role"] == "assistant" else strip_others) for m in messages]
        parts = [frame.pieces[0]]
        for content, piece in zip(contents, frame.pieces[1:], strict=True):
            parts += (content, piece)
        if sum(map(len, parts)) == len(text) and "".join(parts) == text:
            return _spans(messages, contents, text, frame)
    return None


def _stripped(message: Message, strip: bool) -> str:
    return message["content"].strip() if strip else message["content"]


def _spans(messages: Sequence[Message], contents: Sequence[str], text: str, frame: _Frame) -> Rendered:
    answers: list[tuple[int, int]] = []
    at = len(frame.pieces[0])
    for number, (message, content) in enumerate(zip(messages, contents, strict=True)):
        end = at + len(content)
        if message["role"] == "assistant" and content.strip():
            answers.append((at - frame.before[number], end + frame.after[number]))
        at = end + len(frame.pieces[number + 1])
    return Rendered(text, tuple(answers), closed=frame.after[-1] > 0)


def _sentinel(number: int) -> str:
    """A word that no text has, plain enough that no template changes it."""
    return f"Trimtab{number}Sentinel7391"


def _find_frame(template: ChatTemplate, roles: tuple[str, ...]) -> _Frame | None:
    sentinels = [{"role": role, "content": _sentinel(number)} for number, role in enumerate(roles)]
    text = template.text(sentinels, add_generation_prompt=False)
    pieces: list[str] = []
    rest = text
    for message in sentinels:
        piece, found, rest = rest.partition(message["content"])
        if not found:
            return None
        pieces.append(piece)
    pieces.append(rest)
    before, after = [0] * len(roles), [0] * len(roles)
    for number, role in enumerate(roles):
        if role == "assistant":
            before[number], after[number] = _edges(template, sentinels, number, text, pieces)
    return _Frame(tuple(pieces), tuple(before), tuple(after))


def _edges(
    template: ChatTemplate, messages: Sequence[Message], number: int, text: str, pieces: Sequence[str]
) -> tuple[int, int]:
    """How far an answer reaches before and behind its content, in characters."""
    start = sum(map(len, pieces[: number + 1])) + sum(len(m["content"]) for m in messages[:number])
    end = start + len(messages[number]["content"])
    past = _prefix(template, messages[: number + 1], text)
    before = start - _answer_start(template, messages[:number], text, start)
    if past is not None and past >= end:
        return before, _ending(text[end:past])
    # Not stable: what follows each answer of the conversation alike is the end-of-turn.
    return before, _ending(_common_start(pieces[number + 1], pieces[-1]))


def _prefix(template: ChatTemplate, messages: Sequence[Message], text: str, *, prompt: bool = False) -> int | None:
    """Length of the rendered `messages` if `text` begins with them, else None."""
    try:
        beginning = template.text(messages, add_generation_prompt=prompt)
    except ValueError:
        return None
    return len(beginning) if text.startswith(beginning) else None


def _answer_start(template: ChatTemplate, earlier: Sequence[Message], text: str, start: int) -> int:
    """Where the model begins to write: after the generation prompt if the template has one, else at the content."""
    prompted = _prefix(template, earlier, text, prompt=True)
    if prompted is None or prompted > start or prompted == _prefix(template, earlier, text):
        return start
    return prompted


def _ending(tail: str) -> int:
    """Length of the end-of-turn at the start of `tail`: all but blanks at its end, which nobody has to learn."""
    return len(tail.rstrip())


def _common_start(first: str, second: str) -> str:
    size = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    return first[:size]


def _one_by_one(messages: Sequence[Message], text: str, template: ChatTemplate) -> Rendered:
    """Spans of a conversation that no frame fits: the template changes contents."""
    answers: list[tuple[int, int]] = []
    closed = False
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and message["content"].strip():
            span = _between_prefixes(messages, number, text, template)
            answers.append(span or _around_sentinel(messages, number, text, template))
            closed = not text[slice(*answers[-1])].endswith(message["content"].strip())
    return Rendered(text, tuple(answers), closed=closed)


def _between_prefixes(
    messages: Sequence[Message], number: int, text: str, template: ChatTemplate
) -> tuple[int, int] | None:
    """From the generation prompt to the end of the turn, if the text begins with both; else None."""
    past = _prefix(template, messages[: number + 1], text)
    start = _answer_start(template, messages[:number], text, len(text))
    return (start, start + _ending(text[start:past])) if past is not None and start < past else None


def _around_sentinel(messages: Sequence[Message], number: int, text: str, template: ChatTemplate) -> tuple[int, int]:
    """The content of the answer and its end-of-turn."""
    start, stop = _replaced(messages, number, text, template)
    start = _answer_start(template, messages[:number], text, start)
    past = _prefix(template, messages[: number + 1], text)
    if past is not None and past >= stop:
        return start, stop + _ending(text[stop:past])
    last = number == len(messages) - 1
    return start, stop + (_ending(text[stop:]) if last else _turn_end(template, text[stop:]))


def _replaced(messages: Sequence[Message], number: int, text: str, template: ChatTemplate) -> tuple[int, int]:
    """Where answer `number` stands in `text`: between what stays the same when a sentinel takes its place."""
    word = _sentinel(number)
    others = [m if i != number else {"role": "assistant", "content": word} for i, m in enumerate(messages)]
    before, found, after = template.text(others, add_generation_prompt=False).partition(word)
    start, stop = len(before), len(text) - len(after)
    fits = found and start <= stop and text.startswith(before) and text.endswith(after)
    shown = text[start:stop].strip()
    if not fits or not shown or shown not in messages[number]["content"]:
        raise ValueError(
            f"the chat template '{template.name}' changes the conversation so that the answer in message {number + 1} "
            "cannot be found in its text; set data.template: chatml"
        )
    return start, stop


def _turn_end(template: ChatTemplate, tail: str) -> int:
    """The end-of-turn of a middle answer by what the template puts after one in a short conversation."""
    frame = template.frame(("user", "assistant"))
    return _ending(_common_start(tail, frame.pieces[-1])) if frame is not None else 0
