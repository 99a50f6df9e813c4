"""The commands of `trimtab`, each in the module of its kind."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trimtab import __version__
from trimtab.cli import data_commands, demo_commands, run_commands, train_commands, use_commands
from trimtab.cli.output import Session, prepare_streams

app = typer.Typer(
    name="trimtab",
    help="Fine-tune big models on small cards. A job file or a few flags say what is learned; how is decided for you.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"trimtab {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    """Fine-tune big models on small cards. A job file or a few flags say what is learned; how is decided for you."""
    Session.debug = debug


TRAINING, USING, LOOKING = "Train", "Use", "Look and prepare"
app.command("train", rich_help_panel=TRAINING)(train_commands.train)
app.command("resume", rich_help_panel=TRAINING)(train_commands.resume)
app.command("demo", rich_help_panel=TRAINING)(demo_commands.demo)
app.command("eval", rich_help_panel=USING)(use_commands.evaluate)
app.command("predict", rich_help_panel=USING)(use_commands.predict)
app.command("chat", rich_help_panel=USING)(use_commands.chat)
app.command("init", rich_help_panel=LOOKING)(data_commands.init)
app.command("inspect", rich_help_panel=LOOKING)(data_commands.inspect)
app.command("runs", rich_help_panel=LOOKING)(run_commands.runs)
app.command("schema", rich_help_panel=LOOKING)(data_commands.schema)


def run(arguments: list[str] | None = None) -> None:
    """Parse and run; `--debug` is understood before and after the command's name."""
    prepare_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    if "--debug" in given[:end]:
        given = ["--debug", *(word for word in given[:end] if word != "--debug"), *given[end:]]
    app(args=given, prog_name="trimtab")
