"""Trains anyone's own module with the same loop: whole steps, exact resume, out-of-memory recovery, checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from trimtab import engine
from trimtab.data.groups import GroupPlan, MicroBatchLimit, evaluation_parts
from trimtab.data.sources import Collate, DatasetSource, MapDataset
from trimtab.errors import JobError
from trimtab.files import write_atomic
from trimtab.hardware.probe import find_device
from trimtab.job import MachineSection, Precision, Schedule
from trimtab.jobfile import check_sections
from trimtab.models.own import LossFunction, Measures, OwnObjective
from trimtab.parallel.strategy import OneDevice
from trimtab.planning.settings import Compute, Setting, decide_arithmetic, decide_compute
from trimtab.recorder import Listener, Recorder
from trimtab.runs import Run, next_run_path
from trimtab.train.evaluate import evaluate_own
from trimtab.train.loop import LoopPolicy, Metrics
from trimtab.train.optim import LearningRate, OptimizerSettings, warmup_steps

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """What is learned and how; the names are those of the job file."""

    batch_size: int = 16
    epochs: float = 3.0
    max_steps: int | None = None
    learning_rate: float = 1e-3
    schedule: Schedule = "linear"
    warmup: float = 0.06
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 0
    eval_every: int | None = None
    early_stopping: int | None = None
    best_metric: str = "loss"
    higher_is_better: bool | None = None
    """None: a loss is better when lower, everything else when higher."""
    device: str = "auto"
    precision: Precision | Literal["auto"] = "auto"
    micro_batch: int | None = None
    threads: int | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    workers: int = 0
    """Processes that make the items of the data set ahead of time."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise JobError(f"workers is {self.workers}; it is a number of processes.", cure="Set workers=0 or more.")
        check_sections(asdict(self), "Trainer")


class Trainer:
    """Trains `module` on `dataset` with `loss`.

    `loss(module, batch)` returns one loss for each example, shape [examples], so that a step's loss is the same however
    it is cut into micro-batches; `measure(module, batch)` returns named values for each example, whose means the
    evaluation reports. The module should be built under a fixed seed; it is trained in place.

    Raises JobError for a loss of another shape, RunError for an output folder in use.
    """

    def __init__(
        self,
        module: nn.Module,
        dataset: MapDataset,
        loss: LossFunction,
        *,
        eval_dataset: MapDataset | None = None,
        measure: Measures | None = None,
        collate: Collate | None = None,
        output: Path | str | None = None,
        **settings: Any,
    ) -> None:
        unknown = sorted(set(settings) - set(TrainerSettings.__dataclass_fields__))
        if unknown:
            known = ", ".join(TrainerSettings.__dataclass_fields__)
            raise JobError(f"Trainer has no setting {', '.join(unknown)}.", cure=f"Known: {known}.")
        self.settings = TrainerSettings(**settings)
        self.module = module
        self._objective = OwnObjective(module, loss, measure)
        self._dataset, self._eval_dataset, self._collate = dataset, eval_dataset, collate
        self._output = Path(output) if output is not None else None

    def train(self, *, listener: Listener | None = None, resume: bool = False) -> Run:
        """Trains to the end. `resume` goes on with the run in `output`, bit for bit as if it had never stopped."""
        run = self._run(resume)
        with run.lock(), engine.training(run), Recorder(listener) as recorder:
            recorder.attach(run)
            decided = Compute(**run.read("plan")["compute"]) if resume else None
            frozen = [(p, p.data) for p in self.module.parameters() if not p.requires_grad]
            work, compute, shown = self._work(run, recorder, decided)
            if not resume:
                self._begin(run, recorder, compute, shown)
            try:
                result = engine.drive(work, resume=resume)
            finally:
                assert isinstance(work.source, DatasetSource)
                work.source.close()
            # They may have run in bf16; the caller, and the file, get them back as they were.
            for parameter, before in frozen:
                parameter.data = before.to(parameter.device)
            self._save(run)
            progress = result.progress
            recorder.emit(
                "done",
                step=progress.step,
                metrics=result.metrics,
                best_step=progress.best_step,
                model=str(run.model_path),
                train_seconds=progress.train_seconds,
            )
        return run

    def _run(self, resume: bool) -> Run:
        if not resume:
            path = self._output or next_run_path(Path("runs"), type(self.module).__name__, type(self._dataset).__name__)
            return Run.create(path, job_text=None)
        if self._output is None:
            raise JobError("resume needs the run's folder.", cure="Pass output=... to Trainer.")
        return Run.open(self._output)

    def _begin(self, run: Run, recorder: Recorder, compute: Compute, shown: list[Setting]) -> None:
        lines = [asdict(line) for line in shown]
        run.write("plan", {"compute": compute.to_dict(), "settings": lines, "trainer": asdict(self.settings)})
        recorder.emit("start", run_id=run.id, run=str(run.path), versions={"torch": torch.__version__})
        recorder.emit("plan", settings=lines)

    def _work(
        self, run: Run, recorder: Recorder, decided: Compute | None
    ) -> tuple[engine.Work, Compute, list[Setting]]:
        wish, seed = self.settings, self.settings.seed
        device = find_device(decided.device if decided else wish.device)
        machine = MachineSection(
            device="auto", precision=wish.precision, micro_batch=wish.micro_batch, threads=wish.threads
        )
        arithmetic, shown = decide_arithmetic(machine, device, None)
        compute, more = decide_compute(machine, device, arithmetic, None, "your own data set makes the batches")
        compute = decided or compute
        if compute.threads:
            torch.set_num_threads(compute.threads)
        ones = np.ones(len(self._dataset), dtype=np.int32)
        plan = GroupPlan(
            lengths=ones,
            weights=ones.astype(np.float64),
            batch_size=wish.batch_size,
            epochs=wish.epochs,
            seed=seed,
            limit=compute.limit(),
            max_steps=wish.max_steps,
        )
        self.module.to(device.torch_device).train()
        strategy = OneDevice(
            self._objective,
            device=device.torch_device,
            precision=compute.precision,
            settings=OptimizerSettings(wish.learning_rate, wish.weight_decay),
            max_grad_norm=wish.max_grad_norm,
        )
        warm = warmup_steps(wish.warmup, plan.steps)
        work = engine.Work(
            run=run,
            recorder=recorder,
            objective=self._objective,
            source=DatasetSource(self._dataset, seed=seed, collate=self._collate, workers=wish.workers),
            strategy=strategy,
            plan=plan,
            learning_rate=LearningRate(wish.learning_rate, wish.schedule, warm, plan.steps),
            policy=LoopPolicy(wish.eval_every, wish.checkpoint_every, early_stopping=wish.early_stopping),
            keep=wish.keep,
            evaluate=None if self._eval_dataset is None else lambda limit: self._evaluate(strategy, limit),
        )
        return work, compute, [*shown, *more]

    def _evaluate(self, strategy: OneDevice, limit: MicroBatchLimit) -> Metrics:
        assert self._eval_dataset is not None
        source = DatasetSource(self._eval_dataset, seed=self.settings.seed, collate=self._collate)
        parts = evaluation_parts(np.ones(len(self._eval_dataset), dtype=np.int32), limit)
        with strategy.evaluation():
            values = evaluate_own(self._objective, strategy.place(source.batch(part, 0) for part in parts))
        name, higher = self.settings.best_metric, self.settings.higher_is_better
        if name not in values:
            raise JobError(f"best_metric {name!r} is not measured.", cure=f"Measured: {', '.join(values)}.")
        return Metrics(values, name, "loss" not in name if higher is None else higher)

    def _save(self, run: Run) -> None:
        """The trained weights as one safetensors file, by the module's own names."""
        from safetensors.torch import save

        run.model_path.mkdir(exist_ok=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.module.state_dict().items()}
        seen: dict[int, str] = {}
        unshared = {n: t if seen.setdefault(t.data_ptr(), n) == n else t.clone() for n, t in state.items()}
        write_atomic(run.model_path / WEIGHTS_FILE, save(unshared))
