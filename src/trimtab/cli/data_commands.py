"""`init`, `inspect` and `schema`: what helps before training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import JsonFlag, SetOption, read_settings
from trimtab.cli.output import guarded, print_json, print_line, print_note
from trimtab.errors import EXIT_USER_ERROR, TrimtabError
from trimtab.text import program, shell_path


@guarded
def inspect(
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="File, folder or hub data set.")],
    model: Annotated[str, typer.Option("--model", help="Model folder, .gguf file or hub id, whose tokenizer counts.")],
    settings: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell the truth about data: rows used and dropped, lengths, labels, what would be cut."""
    from trimtab import api

    report = api.inspect(data, model, read_settings(settings))
    if as_json:
        print_json(report.to_dict())
    else:
        for line in report.lines():
            print_line(line)
    if report.refusals:
        raise typer.Exit(EXIT_USER_ERROR)  # Training would refuse it, so that scripts can tell.


@guarded
def init(
    model: Annotated[str, typer.Option("--model", help="Model folder, .gguf file or hub id.")],
    data: Annotated[list[str], typer.Option("--data", help="File, folder or hub data set to learn from. Repeat it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The job file to write.")] = Path("job.yaml"),
    settings: SetOption = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Write the JSON schema beside it, so that editors complete keys.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write a job file in which every key is explained, for this model and data."""
    from trimtab.cli.rows import open_output
    from trimtab.cli.starter import starter_text

    values = _given(model, data, settings, output.absolute().parent)
    notes: dict[str, str] = {}
    if "task.kind" not in values:
        kind, note = _inferred_task(model, data, settings)
        notes["task.kind"] = note
        if kind:
            values["task.kind"] = kind
    with open_output(output, force=force) as stream:
        stream.write(starter_text(values, notes, schema=f"{output.stem}.schema.json" if schema else ""))
    if schema:
        _write_schema(output.with_suffix(".schema.json"))
    if as_json:
        print_json({"job_file": str(output), "values": values})
    else:
        print_line(f"Wrote {output}. Look it over, then run: {program()} train {shell_path(output)}")


def _given(model: str, data: list[str], settings: list[str] | None, folder: Path) -> dict[str, Any]:
    """The keys set on the command line, checked, with paths as the job file's folder sees them."""
    from trimtab.cli.options import merge_flags, quote_list
    from trimtab.jobfile import job_from_flags, quoted

    flags: dict[str, str | None] = {"model.path": quoted(model), "data.train": quote_list(data)}
    overrides = merge_flags(read_settings(settings), flags)
    job = job_from_flags(overrides).model_dump()
    values = {key: job[key.split(".")[0]][key.split(".")[1]] for key in overrides}
    for key in ("model.path", "data.train", "data.eval", "data.template"):
        if key in values:
            value = values[key]
            values[key] = [_seen_from(folder, item) for item in value] if isinstance(value, list) else value
            if isinstance(value, str):
                values[key] = _seen_from(folder, value)
    return values


def _seen_from(folder: Path, value: str) -> str:
    """An absolute path below `folder` (or near it) as a relative one; anything else as it is."""
    path = Path(value)
    if not path.is_absolute():
        return value
    try:
        relative = Path(os.path.relpath(path, folder))
    except ValueError:  # another drive on Windows
        return value
    if len(relative.parts) and relative.parts[0] == ".." and relative.parts[1:2] == ("..",):
        return value
    return f"./{relative.as_posix()}" if relative.parts[0] != ".." else relative.as_posix()


def _inferred_task(model: str, data: list[str], settings: list[str] | None) -> tuple[str | None, str]:
    """The task that data and model make plain, and why; or None and what stood in the way."""
    from trimtab import api

    try:
        report = api.inspect(data, model, read_settings(settings)).to_dict()
    except TrimtabError as error:
        print_note(f"note: the task is left open, since the data could not be read with this model: {error}")
        return None, "Not inferred yet: `trimtab inspect` says why."
    kind = report.get("task")
    return (str(kind), "Inferred from data and model.") if isinstance(kind, str) else (None, "Not plain from the data.")


def _write_schema(path: Path) -> None:
    from trimtab.cli.output import to_json

    path.write_text(to_json(_schema_document(), indent=2) + "\n", encoding="utf-8")


def _schema_document() -> dict[str, object]:
    from trimtab.job import job_schema

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **job_schema()}


@guarded
def schema(
    keys: Annotated[bool, typer.Option("--keys", help="A list of keys with explanations instead.")] = False,
) -> None:
    """Print the JSON schema of the job file, or its keys explained."""
    if not keys:
        print_json(_schema_document())
        return
    from trimtab.job import known_keys

    for key, explanation in known_keys().items():
        print_line(f"{key:<28}{explanation}")
