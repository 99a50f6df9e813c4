"""Drives the loop for one Run: status, signals, checkpoints, resume, best weights. Knows nothing of models or data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trimtab.data.groups import GroupPlan, MicroBatchLimit
from trimtab.errors import Interrupted, RunError
from trimtab.parallel.strategy import OneDevice
from trimtab.recorder import Recorder
from trimtab.runs import Run
from trimtab.text import program, shell_path
from trimtab.train.checkpoint import CheckpointStore
from trimtab.train.feed import BatchSource, FedGroup, GroupFeed
from trimtab.train.loop import DATA_WAIT_SHARE, Loop, LoopPolicy, LoopResult, Metrics, Progress
from trimtab.train.optim import LearningRate
from trimtab.train.recover import first_non_finite
from trimtab.train.signals import StopRequest


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything built that one run needs."""

    run: Run
    recorder: Recorder
    objective: Any
    source: BatchSource
    strategy: OneDevice
    plan: GroupPlan
    learning_rate: LearningRate
    policy: LoopPolicy
    keep: int
    evaluate: Callable[[MicroBatchLimit], Metrics] | None = None
    name_rows: Callable[[FedGroup], str] | None = None
    """Names the rows of a group for messages, such as `train.csv:17`."""


@contextmanager
def training(run: Run) -> Generator[None]:
    """Has the run's status tell that it is being trained and how that ended, the writing of its model included.

    Whoever enters holds the run's lock.
    """
    run.set_status("training")
    try:
        yield
    except BaseException as error:
        # A disk that took no checkpoint takes no status either; what went wrong first is what the user must read.
        with suppress(RunError):
            run.set_status("interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed")
        raise
    run.set_status("done")


def drive(work: Work, *, resume: bool = False) -> LoopResult:
    """Trains to the end and leaves the best weights in the module, inside `training`.

    Raises:
        Interrupted: after a wish to stop, once the step is finished and a checkpoint saved.
        NotFiniteError, MachineError: see `trimtab.train.loop`.
    """
    run = work.run
    store = CheckpointStore(run.path, run.id, work.keep)
    feed = GroupFeed(work.plan, work.source, work.strategy.stage)
    with StopRequest() as stop, feed:
        progress = _restore(work, store) if resume else Progress()
        loop = Loop(
            plan=work.plan,
            feed=feed,
            strategy=work.strategy,
            learning_rate=work.learning_rate,
            policy=work.policy,
            emit=work.recorder.emit,
            saver=_RecordingSaver(store, work.recorder),
            stop_requested=lambda: stop.requested,
            evaluate=work.evaluate,
            explain_not_finite=lambda fed: _explain(work, fed),
            progress=progress,
        )
        result = loop.run()
        if not result.finished:
            raise _interrupted(work, result.progress)
        _keep_best(work, store, result.progress)
    _say_waiting(work.recorder, result.progress)
    work.strategy.finish()
    return replace(result, metrics=_kept_metrics(run, result))


@dataclass(frozen=True)
class _RecordingSaver:
    """Saves a checkpoint and says so."""

    store: CheckpointStore
    recorder: Recorder

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        metric: float | None = None,
        is_best: bool = False,
    ) -> None:
        saved = self.store.save(step, tensors, dict(state), metric=metric, is_best=is_best)
        self.recorder.emit("checkpoint", step=step, path=str(saved.path), seconds=saved.seconds, bytes=saved.bytes)
        _pass_on_messages(self.store, self.recorder)


def _pass_on_messages(store: CheckpointStore, recorder: Recorder) -> None:
    """What the store passed over or could not clean up."""
    for message in store.messages:
        recorder.emit("warning", code="checkpoint", message=message, cure="")


def _restore(work: Work, store: CheckpointStore) -> Progress:
    """Puts the newest whole checkpoint back; a run stopped before its first one starts at step 0."""
    loaded = store.newest()
    _pass_on_messages(store, work.recorder)
    if loaded is None:
        work.recorder.emit("resume", step=0, checkpoint=None)
        return Progress()
    work.strategy.load(loaded.tensors, loaded.state["strategy"])
    progress = Progress.from_state(loaded.state["progress"])
    work.recorder.emit("resume", step=progress.step, checkpoint=str(loaded.path))
    return progress


def _keep_best(work: Work, store: CheckpointStore, progress: Progress) -> None:
    """The model that is handed over is the best one by the run's metric, not just the last."""
    if progress.best_step is None or progress.best_step == progress.step:
        return
    best = store.best()
    if best is None or best.step != progress.best_step:
        raise RunError(
            f"the best checkpoint (step {progress.best_step}) of {work.run.path} is missing or damaged.",
            cure="The newest checkpoint is whole; set training.best_metric anew in a fresh run to choose another.",
        )
    work.strategy.load_weights(best.tensors["weights"])


def _kept_metrics(run: Run, result: LoopResult) -> dict[str, float]:
    """The metrics of the weights that were kept: the best evaluation's, where there was one."""
    best = [event for event in run.events() if event["kind"] == "eval" and event["step"] == result.progress.best_step]
    return best[-1]["metrics"] if best else result.metrics


def _interrupted(work: Work, progress: Progress) -> Interrupted:
    command = f"{program()} resume {shell_path(work.run.path)}"
    work.recorder.emit("stop", reason="asked to stop", step=progress.step, resume_command=command)
    return Interrupted(
        f"stopped after step {progress.step} of {work.plan.steps}; everything is saved.", cure=f"Go on with: {command}"
    )


def _explain(work: Work, fed: FedGroup) -> str:
    rows = f" (rows {work.name_rows(fed)})" if work.name_rows else ""
    with work.strategy.evaluation():
        return first_non_finite(work.objective, work.strategy.place(fed.batches)) + rows


def _say_waiting(recorder: Recorder, progress: Progress) -> None:
    share = progress.wait_seconds / progress.train_seconds if progress.train_seconds else 0.0
    if share > DATA_WAIT_SHARE:
        recorder.emit(
            "warning",
            code="data_wait",
            message=f"{share:.0%} of the training time went into waiting for data",
            cure="Use faster storage, or more workers where the data set is your own.",
        )
