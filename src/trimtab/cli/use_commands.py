"""`eval`, `predict` and `chat`: what a trained Run is for."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import JsonFlag
from trimtab.cli.output import guarded, print_json, print_line, print_note
from trimtab.errors import DataError, TrimtabError

if TYPE_CHECKING:
    from trimtab.cli.rows import Item
    from trimtab.predictor import Predictor

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished Run.")]


@guarded
def evaluate(
    run: RunArgument,
    data: Annotated[list[str], typer.Option("--data", help="File, folder or hub data set with labels. Repeat it.")],
    encoding: Annotated[
        str | None, typer.Option(help="Of the data, for instance gbk. Left out: that of the training data.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a Run's model on other data."""
    from trimtab import api
    from trimtab.cli.progress import Reporter

    with Reporter() as reporter:
        metrics = api.evaluate(run, data, encoding=encoding, listener=reporter)
    if as_json:
        print_json({"run": str(run), "data": data, "metrics": metrics})
        return
    width = max((len(name) for name in metrics), default=0)
    for name, value in metrics.items():
        print_line(f"{name:<{width}}  {value:.6g}")


@guarded
def predict(
    run: RunArgument,
    source: Annotated[str | None, typer.Argument(metavar="FILE|-", help="Text, CSV or JSON lines; - is stdin.")] = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="A text given here instead. Repeat it.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write: .jsonl, .csv or .tsv.")] = None,
    row_format: Annotated[
        str | None, typer.Option("--format", help="Of the input: text, csv, tsv, jsonl, json.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of the input, for instance gbk. Left out: utf-8 or that of the training data.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over the output file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document with all predictions.")] = False,
) -> None:
    """Apply a Run's model to texts or rows: one JSON object a line, or CSV."""
    from trimtab.cli import rows

    kind = rows.output_format(output)
    if output is not None:
        rows.check_target(output, force=force)
    with _items(source, text, row_format, encoding or _encoding(run, source)) as items:
        _check_there(run)
        from trimtab import api

        predictions = paired(api.load(run), items)
        if as_json:
            print_json({"run": str(run), "predictions": list(predictions)})
            return
        with rows.open_output(output, force=force) as stream:
            delimiter = "\t" if kind == "tsv" else ","
            count = rows.write_rows(predictions, stream, as_csv=kind in ("csv", "tsv"), delimiter=delimiter)
    if output is not None:
        print_note(f"{count} predictions written to {output}")


def _check_there(run: Path) -> None:
    """Refuse a Run that is not there, in the words of Run.open; `name` and `owner/name` may be models of the hub."""
    from trimtab.runs import Run

    if run.exists() or (len(run.parts) == 1 and not run.is_absolute()):
        return
    local = run.is_absolute() or len(run.parts) != 2 or run.parts[0] in ("runs", "..", "~")
    if local or run.parent.is_dir():
        Run.open(run)


def _encoding(run: Path, source: str | None) -> str:
    """UTF-8, or that of the training data for a file that is not UTF-8."""
    from trimtab.cli.rows import is_utf8
    from trimtab.runs import Run

    if source is None or source == "-" or is_utf8(Path(source)):
        return "utf-8"
    try:
        return Run.open(run).job.data.encoding
    except TrimtabError:
        return "utf-8"


@contextmanager
def _items(
    source: str | None, texts: list[str] | None, row_format: str | None, encoding: str
) -> Generator[Iterable[Item], None, None]:
    """Rows of a file, of stdin, or of `--text`; exactly one of them."""
    from trimtab.cli import rows

    if (source is None) == (not texts):
        raise DataError(
            "give either a file (or '-' for standard input) or --text.",
            cure='For instance: trimtab predict RUN --text "how are you?"',
        )
    if source is None:
        yield list(texts or ())
        return
    kind = rows.format_of(source, row_format)
    with rows.open_input(source, encoding) as stream:
        yield rows.read_items(stream, kind, "standard input" if source == "-" else source)


def paired(predictor: Predictor, items: Iterable[Item]) -> Iterator[dict[str, Any]]:
    """Each input joined with its prediction, in order, without holding more than a batch."""
    from trimtab.cli.rows import merged

    waiting: deque[Item] = deque()

    def remembered() -> Iterator[Item]:
        for item in items:
            waiting.append(item)
            yield item

    for prediction in predictor.predict(remembered()):
        yield merged(waiting.popleft(), prediction)


@guarded
def chat(
    run: RunArgument,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask this, print the answer, and leave.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="With --message: print a JSON document.")] = False,
) -> None:
    """Talk to a Run's language model. /reset forgets the conversation, /quit leaves."""
    if as_json and message is None:
        raise DataError("--json needs --message, since a conversation is no document.", cure="Add --message TEXT.")
    _check_there(run)
    from trimtab import api
    from trimtab.cli.conversation import Conversation

    talk = Conversation(api.load(run), system=system, max_new_tokens=max_new_tokens, temperature=temperature)
    if message is None:
        talk.loop()
    elif as_json:
        print_json({"run": str(run), "message": message, "answer": "".join(talk.answer(message))})
    else:
        talk.show(message)
