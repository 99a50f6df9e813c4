"""A conversation in the terminal: answers appear while they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trimtab.cli.output import print_note
from trimtab.text import safe

if TYPE_CHECKING:
    from trimtab.predictor import Predictor

HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C stops an answer."


class Conversation:
    """The messages so far, and how answers are made."""

    def __init__(self, predictor: Predictor, *, system: str | None, max_new_tokens: int, temperature: float) -> None:
        self.predictor = predictor
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._start)

    def reset(self) -> None:
        self.messages = list(self._start)

    def answer(self, message: str) -> Iterator[str]:
        """The pieces of the answer. The conversation keeps what was said, also when it is broken off."""
        self.messages.append({"role": "user", "content": message})
        pieces: list[str] = []
        try:
            for piece in self.predictor.chat(
                self.messages, max_new_tokens=self.max_new_tokens, temperature=self.temperature
            ):
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def show(self, message: str) -> None:
        """Write the answer to stdout as it comes."""
        for piece in self.answer(message):
            sys.stdout.write(safe(piece, newlines=True))
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()

    def loop(self) -> None:
        """Read lines until `/quit`, the end of the input, or Ctrl-C at the prompt."""
        if sys.stdin.isatty():
            print_note(HELP)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/quit":
                return
            if line == "/reset":
                self.reset()
                print_note("The conversation starts anew.")
            elif line.startswith("/"):
                print_note(HELP)
            elif line:
                self._show_until_stopped(line)

    def _show_until_stopped(self, line: str) -> None:
        try:
            self.show(line)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            print_note("Stopped.")
