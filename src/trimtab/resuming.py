"""What a resumed run must have in common with its start, and what its start decided."""

from __future__ import annotations

from typing import Any

from trimtab.errors import MachineError, RunError
from trimtab.hardware.probe import find_device
from trimtab.intake import Intake
from trimtab.job import Job
from trimtab.planning.settings import Compute
from trimtab.recorder import Recorder
from trimtab.runs import Run
from trimtab.text import program, shell_path


def kept_settings(job: Job) -> dict[str, Any]:
    """Every key of the job that a resumed run must keep, by its dotted name.

    Paths may change, since models and data move: what lies there is told by the data's digest.
    """
    sections = job.model_dump(exclude={"output": True, "model": {"path"}, "data": {"train", "eval", "template"}})
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def check_same_job(run: Run, job: Job) -> None:
    """A job.yaml that was edited since: going on with it would train neither this run nor the one it describes."""
    was = run.read("plan").get("job", {})
    for key, value in kept_settings(job).items():
        if key in was and was[key] != value:
            raise RunError(
                f"{run.job_path} was changed: {key} is {value}, and the run began with {was[key]}.",
                cure=f"Put it back, or start a new run: {program()} train {shell_path(run.job_path)} --output NEW_RUN",
            )


def decided(run: Run, intake: Intake, recorder: Recorder) -> Compute | None:
    """What the run's start decided, after seeing that it would read the same data now; None on a machine without its
    device, where the same steps are computed another way.
    """
    plan = run.read("plan", "data_digest", "compute")
    _check_same_data(run, intake, str(plan["data_digest"]))
    try:
        compute = Compute(**plan["compute"])
    except TypeError as error:
        raise RunError(
            f"{run.path / 'plan.json'} is not as it was written: {error}.", cure="Start the run anew from its job.yaml."
        ) from error
    try:
        find_device(compute.device)
    except MachineError:
        message = f"this run began on {compute.device}, which is not here: the same steps go on, but not bit for bit"
        recorder.emit("warning", code="device", message=message, cure="")
        return None
    return compute


def _check_same_data(run: Run, intake: Intake, was: str) -> None:
    if was != intake.digest:
        raise RunError(
            f"the data, the tokenizer or the model's settings are not those that {run.path} began with "
            f"(digest {intake.digest[:12]}, was {was[:12]}).",
            cure="Put the files back as they were, or start a new run.",
        )
