"""Conversations: which of four formats the columns have, and one row as checked messages. Loads no torch.

A message is `{"role": "system" | "user" | "assistant", "content": text}`. What makes text of them lies in
`trimtab.data.rendering` and is offered here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.data.rendering import ChatTemplate, Rendered, load_template, render

__all__ = ["FORMATS", "ChatTemplate", "Message", "Rendered", "detect_format", "load_template", "render", "to_messages"]

Message = dict[str, str]

FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion")

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
}
_PROMPT_NAMES = ("prompt", "question")
_COMPLETION_NAMES = ("completion", "answer")


def detect_format(columns: Sequence[str]) -> str | None:
    """The chat format that these columns have, or None.

    `question` and `answer` are read as `prompt_completion` by `to_messages`, but never detected: such columns also
    belong to classification sets, so the job has to say it.
    """
    names = set(columns)
    if "messages" in names:
        return "messages"
    if "conversations" in names:
        return "sharegpt"
    if {"instruction", "output"} <= names:
        return "alpaca"
    if {"prompt", "completion"} <= names:
        return "prompt_completion"
    return None


def to_messages(row: Mapping[str, Any], fmt: str) -> list[Message]:
    """The row as messages: system first or absent, then user and assistant in turn, an assistant last.

    `fmt` is one of `FORMATS`. A column `system` with text becomes the system message of a conversation without one.
    Raises ValueError with a plain reason when the row is no such conversation.
    """
    messages = _READERS[fmt](row)
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"'system' is {_kind(system)}, text is expected")
    if system and system.strip() and messages[:1] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    _check_order(messages)
    return messages


def _read_messages(row: Mapping[str, Any]) -> list[Message]:
    return _turns(row.get("messages"), "messages")


def _read_sharegpt(row: Mapping[str, Any]) -> list[Message]:
    return _turns(row.get("conversations"), "conversations")


def _read_alpaca(row: Mapping[str, Any]) -> list[Message]:
    instruction = _text(row, "instruction")
    extra = _text(row, "input", optional=True)
    question = f"{instruction}\n\n{extra}" if instruction.strip() and extra.strip() else instruction + extra
    messages = _history(row.get("history"))
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text(row, "output")})
    return messages


def _history(history: Any) -> list[Message]:
    """Earlier exchanges of an alpaca row: a list of [question, answer], or nothing."""
    if history is None:
        return []
    if not isinstance(history, (list, tuple)):
        raise ValueError(f"'history' is {_kind(history)}, a list of [question, answer] is expected")
    messages: list[Message] = []
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"entry {number} of 'history' is not a [question, answer] of two texts")
        messages.append({"role": "user", "content": pair[0]})
        messages.append({"role": "assistant", "content": pair[1]})
    return messages


def _read_prompt_completion(row: Mapping[str, Any]) -> list[Message]:
    prompt_name = next((name for name in _PROMPT_NAMES if name in row), _PROMPT_NAMES[0])
    completion_name = next((name for name in _COMPLETION_NAMES if name in row), _COMPLETION_NAMES[0])
    return _side(row, prompt_name, "user") + _side(row, completion_name, "assistant")


def _side(row: Mapping[str, Any], name: str, role: str) -> list[Message]:
    """A prompt or completion: a text, or messages."""
    if isinstance(row.get(name), (list, tuple)):
        return _turns(row[name], name)
    return [{"role": role, "content": _text(row, name)}]


_READERS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "prompt_completion": _read_prompt_completion,
}


def _turns(value: Any, column: str) -> list[Message]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"'{column}' is {_kind(value)}, a list of messages is expected")
    if not value:
        raise ValueError(f"'{column}' is an empty list")
    return [_turn(item, number) for number, item in enumerate(value, start=1)]


def _turn(item: Any, number: int) -> Message:
    """One message, written as role and content or as from and value."""
    if not isinstance(item, Mapping):
        raise ValueError(f"message {number} is {_kind(item)}, an object with role and content is expected")
    role_key, content_key = ("role", "content") if item.get("role") is not None else ("from", "value")
    role, content = item.get(role_key), item.get(content_key)
    if role is None:
        raise ValueError(f"message {number} names neither 'role' nor 'from'")
    known = _ROLES.get(role.lower()) if isinstance(role, str) else None
    if known is None:
        raise ValueError(f"message {number} has the role {role!r}; known are system, user (human), assistant (gpt)")
    if not isinstance(content, str):
        raise ValueError(f"'{content_key}' of message {number} ({known}) is {_kind(content)}, text is expected")
    return {"role": known, "content": content}


def _text(row: Mapping[str, Any], name: str, *, optional: bool = False) -> str:
    value = row.get(name)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"'{name}' is {_kind(value)}, text is expected")
    return value


def _check_order(messages: list[Message]) -> None:
    first = 1 if messages[0]["role"] == "system" else 0
    for number, message in enumerate(messages[first:], start=first + 1):
        _check_turn(message, number, "user" if (number - first) % 2 else "assistant")
    if messages[-1]["role"] != "assistant":
        raise ValueError(
            f"the last message ({len(messages)}) is from the {messages[-1]['role']}; an assistant's answer must be last"
        )
    if not any(m["content"].strip() for m in messages if m["role"] == "assistant"):
        raise ValueError("every assistant message is empty")


def _check_turn(message: Message, number: int, expected: str) -> None:
    """One message against the role that is due; `number` counts from 1."""
    role = message["role"]
    if role == "system":
        raise ValueError(f"message {number} is a system message; only the first may be one")
    if role != expected:
        what = "two user turns in a row" if role == "user" else "an assistant turn without a user turn before it"
        raise ValueError(f"message {number} is from the {role} where the {expected} is due ({what})")
    if role == "user" and not message["content"].strip():
        raise ValueError(f"message {number} (user) is empty")


def _kind(value: Any) -> str:
    """What a value is, in a user's words."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return f"a number ({value})"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, (list, tuple)) else f"of type {type(value).__name__}"
