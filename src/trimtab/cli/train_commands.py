"""`train` and `resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.options import DataOption, JsonFlag, ModelOption, SetOption, merge_flags, quote_list, read_settings
from trimtab.cli.output import guarded, print_json
from trimtab.errors import JobError

if TYPE_CHECKING:
    from trimtab.job import Job


@guarded
def train(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="Job file; flags win over it.")] = None,
    model: ModelOption = None,
    data: DataOption = None,
    task: Annotated[str | None, typer.Option("--task", help="Left out: inferred from data and model.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Folder of the Run. Left out: a new one below runs/.")
    ] = None,
    settings: SetOption = None,
    eval_first: Annotated[bool, typer.Option("--eval-first", help="Evaluate before the first step, too.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune a model, as a job file or the flags say."""
    job = _job(job_file, model, data, task, output, settings)

    from trimtab import api
    from trimtab.cli.progress import Reporter
    from trimtab.cli.summary import print_summary, run_document

    with Reporter() as reporter:
        run = api.train(job, listener=reporter, evaluate_first=eval_first)
    if as_json:
        print_json(run_document(run, reporter))
    else:
        print_summary(run, reporter)


def _job(
    job_file: Path | None,
    model: str | None,
    data: list[str] | None,
    task: str | None,
    output: str | None,
    settings: list[str] | None,
) -> Job:
    from trimtab.jobfile import job_from_flags, load_job, quoted

    flags = {
        "model.path": quoted(model) if model is not None else None,
        "data.train": quote_list(data) if data else None,
        "task.kind": task,
        "output.run": quoted(output) if output is not None else None,
    }
    overrides = merge_flags(read_settings(settings), flags)
    if job_file is not None:
        return load_job(job_file, overrides)
    if not overrides:
        raise JobError(
            "nothing to train: neither a job file nor --model and --data are given.",
            cure="Try `trimtab train job.yaml`, `trimtab train --model M --data D`, or `trimtab demo`.",
        )
    return job_from_flags(overrides)


@guarded
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the Run to go on with.")],
    as_json: JsonFlag = False,
) -> None:
    """Go on with a Run that was stopped, from its newest whole checkpoint."""
    from trimtab import api
    from trimtab.cli.progress import Reporter
    from trimtab.cli.summary import print_summary, run_document

    with Reporter() as reporter:
        done = api.resume(run, listener=reporter)
    if as_json:
        print_json(run_document(done, reporter))
    else:
        print_summary(done, reporter)
