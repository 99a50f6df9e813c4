"""`demo`: something real, trained in minutes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from trimtab.cli.options import JsonFlag
from trimtab.cli.output import guarded, print_json, print_line, print_note
from trimtab.errors import JobError, did_you_mean
from trimtab.text import program, safe, shell_word

DEMOS = ("topics", "chat")


def _load(name: str) -> ModuleType:
    if name == "chat":
        from trimtab.demo import chat

        return chat
    from trimtab.demo import topics

    return topics


@guarded
def demo(
    name: Annotated[str, typer.Argument(metavar="topics|chat", help="A text classifier, or a chat model.")] = "topics",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the Run. Left out: a new one below runs/.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune a small real model: `topics` sorts questions, `chat` learns who it is."""
    if name not in DEMOS:
        raise JobError(f"there is no demo '{safe(name, limit=40)}'.", cure=did_you_mean(name, DEMOS))
    chosen = _load(name)

    from trimtab.cli.progress import Reporter
    from trimtab.units import format_seconds

    print_note(chosen.INTRODUCTION)
    with Reporter() as reporter:
        result = chosen.run(output, listener=reporter)
    if as_json:
        print_json(result.to_dict())
        return
    print_line()
    print_line(f"{result.metric} before: {result.metric_before:.3f}   after: {result.metric_after:.3f}")
    for question, before, after in result.answers:
        print_line(f"{question}\n  before: {before}\n  after:  {after}")
    print_line(f"trained in {format_seconds(result.train_seconds)}")
    print_line(f"model: {result.model}")
    print_line("try it: " + " ".join([program(), *(shell_word(word) for word in result.command)]))
