"""The product as functions: train, resume, evaluate, load, inspect. The only module that knows every concrete class."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trimtab import assembly, engine
from trimtab.data import examples, tokenize
from trimtab.data.report import DataReport
from trimtab.data.task import TaskSpec
from trimtab.errors import ModelError, RunError
from trimtab.export.final import Opened, open_final, save_final
from trimtab.export.model_card import CardFacts, installed_versions
from trimtab.files import from_home, require_space
from trimtab.hardware.probe import Device, fast_threads, find_device
from trimtab.intake import Intake, cache_folder, read, take_in, tokenize_options
from trimtab.job import Job
from trimtab.jobfile import dump_job, job_from_flags, parse_job, quoted
from trimtab.kernels.host_memory import bound_kernel_cache
from trimtab.models import load as model_load
from trimtab.models import source
from trimtab.models.adapters import is_adapted
from trimtab.models.facts import read_facts
from trimtab.predictor import Predictor
from trimtab.recorder import Listener, Recorder
from trimtab.resuming import check_same_job, decided, kept_settings
from trimtab.runs import Run, check_free, next_run_path
from trimtab.text import program, shell_path
from trimtab.train.loop import LoopPolicy, LoopResult
from trimtab.train.optim import LearningRate
from trimtab.trainer import Trainer

_TASK_KEYS = ("kind", "text_columns", "label_columns", "label_names", "chat_format", "max_length", "class_weights")

__all__ = ["Predictor", "Run", "Trainer", "evaluate", "inspect", "load", "resume", "train"]


def train(job: Job, *, listener: Listener | None = None, evaluate_first: bool = False) -> Run:
    """Carries out a job: reads, plans, trains, and leaves the finished model in the Run that it returns.

    `listener` gets every event as it happens. `evaluate_first` measures the model before the first step too.

    Raises:
        TrimtabError: whatever the user can mend, before anything is written where it can be known before.
        Interrupted: it was asked to stop; `resume` goes on.
    """
    bound_kernel_cache()
    path = _run_path(job)
    check_free(path)
    with Recorder(listener) as recorder:
        intake = take_in(job, cache_dir=cache_folder(), phase=recorder.phase)
        _tell_data(recorder, intake)
        assembled = assembly.assemble(job, intake)
        require_space(path, _least_disk_bytes(assembled), "the run (one checkpoint and the finished model)")
        run = _create(job, path)
        with run.lock(), engine.training(run):
            recorder.attach(run)
            _begin(run, recorder, intake, assembled)
            if evaluate_first:
                _evaluate_before(recorder, assembled)
            result = engine.drive(_work(job, run, recorder, intake, assembled))
            _finish(run, recorder, job, intake, assembled, result)
    return run


def resume(run: Path, *, listener: Listener | None = None) -> Run:
    """Goes on with an interrupted run from its newest whole checkpoint, bit for bit as if it had never stopped."""
    bound_kernel_cache()
    opened = Run.open(run)
    if opened.status == "done":
        raise RunError(f"{run} is finished.", cure=f"Use it with: {program()} predict {shell_path(run)}")
    job = opened.job
    begun = opened.has_begun
    if begun:
        opened.read("task", "kind", "label_names")
        check_same_job(opened, job)
    with opened.lock(), Recorder(listener) as recorder:
        intake = take_in(job, cache_dir=cache_folder(), phase=recorder.phase)
        earlier = decided(opened, intake, recorder) if begun else None
        if not begun:
            _tell_data(recorder, intake)
        assembled = assembly.assemble(job, intake, decided=earlier)
        with engine.training(opened):
            recorder.attach(opened)
            if not begun:  # stopped between the making of its folder and its first step
                _begin(opened, recorder, intake, assembled)
            result = engine.drive(_work(job, opened, recorder, intake, assembled), resume=True)
            _finish(opened, recorder, job, intake, assembled, result)
    return opened


def load(path: Path | str, *, device: str = "auto") -> Predictor:
    """A finished run's model, or any language model's folder, GGUF file or hub id, ready to be asked.

    On a CPU it sets torch's number of threads, as training does.
    """
    where = _run_of(Path(path))
    found = find_device(device)
    torch_device = found.torch_device
    _use_threads(found)
    if not (where / "run.json").is_file():
        return _load_language_model(str(path), torch_device)
    run = Run.open(where)
    _check_done(run)
    document = run.read("task", *_TASK_KEYS)
    spec = _spec_from(document)
    opened = _open_model(run, spec)
    longest = opened.facts.max_positions or document["max_length"]
    options = tokenize.TokenizeOptions(max_length=longest)
    return Predictor(opened.model, opened.tokenizer, spec, options, torch_device)


def _run_of(path: Path) -> Path:
    """The run of a finished model's folder; any other path as it is."""
    inside = path.name == "model" and (path.parent / "run.json").is_file()
    return path.parent if inside else path


def _use_threads(device: Device, wanted: int | None = None) -> None:
    """On a busy machine two threads may answer many times slower than one, so it is measured."""
    if device.type == "cpu":
        torch.set_num_threads(wanted or fast_threads())


def evaluate(
    run: Path | str, data: Sequence[str], *, encoding: str | None = None, listener: Listener | None = None
) -> dict[str, float]:
    """Measures a finished run's model on other data with labels. `encoding` left out: that of the training data."""
    opened = Run.open(_run_of(Path(run)))
    _check_done(opened)
    job, task, cache = opened.job, opened.read("task", *_TASK_KEYS), cache_folder()
    spec = _spec_from(task)
    recorder = Recorder(listener)
    final = _open_model(opened, spec)
    section = job.data if encoding is None else job.data.model_copy(update={"encoding": encoding})
    part = examples.prepare_evaluation(spec, read(data, section, cache, recorder.phase))
    options = tokenize_options(job, spec, final.facts, final.tokenizer.tokenizer)
    store = tokenize.tokenize(part, spec, final.tokenizer.tokenizer, options, cache_dir=cache)
    device = find_device(job.machine.device)
    _use_threads(device, job.machine.threads)
    weights = None if task["class_weights"] is None else tuple(task["class_weights"])
    return assembly.measure(final.model, final.tokenizer.pad_id, store, device.torch_device, weights)


def inspect(data: Sequence[str], model: str, settings: Mapping[str, str] | None = None) -> DataReport:
    """The truth report on data for a model, without training."""
    listed = [str(item) for item in data]
    flags = {"model.path": quoted(model), "data.train": "[" + ", ".join(quoted(item) for item in listed) + "]"}
    return take_in(job_from_flags(flags | dict(settings or {})), cache_dir=cache_folder()).report


def _run_path(job: Job) -> Path:
    if job.output.run is not None:
        return from_home(job.output.run)
    train = job.data.train
    first = train if isinstance(train, str) else train[0]
    return next_run_path(Path("runs"), job.model.path, first)


def _create(job: Job, path: Path) -> Run:
    """The run at `path`; where another start took a name that was not asked for meanwhile, at the next one."""
    text = dump_job(_anchored(job))
    if job.output.run is None and path.exists():
        path = _run_path(job)
    return Run.create(path, job_text=text)


def _least_disk_bytes(assembled: assembly.Assembled) -> int:
    """What a run writes at the very least: trained weights with two moments of AdamW, and the model, all float32."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in assembled.applied.model.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    written = trained if is_adapted(assembled.applied.model) else sum(size for size, _ in sizes)
    return 4 * (3 * trained + written)


def _anchored(job: Job) -> Job:
    """The job with absolute paths, so that the run can be resumed from any folder."""
    return parse_job(dump_job(job), base=Path.cwd())


def _tell_data(recorder: Recorder, intake: Intake) -> None:
    """The truth about the data, before any weight is loaded."""
    recorder.emit("data", lines=intake.report.short_lines())
    recorder.phase("load the model and measure this machine", 0, 0)


def _begin(run: Run, recorder: Recorder, intake: Intake, assembled: assembly.Assembled) -> None:
    """Writes down what the run is, before its first step."""
    plan = assembly.plan_document(assembled)
    run.write("data", intake.report.to_dict())
    learned = {"max_length": intake.options.max_length, "class_weights": assembled.source.class_weights}
    run.write("task", asdict(intake.spec) | learned)
    # The plan comes last: a run that has one has begun.
    begun = {"data_digest": intake.digest, "steps": assembled.plan.steps, "job": kept_settings(run.job)}
    run.write("plan", plan | begun)
    recorder.emit("start", run_id=run.id, run=str(run.path), versions=installed_versions())
    recorder.emit("plan", settings=plan["settings"], steps=assembled.plan.steps)
    notes = (*intake.facts.notes, *intake.tokenizer.notes, *assembled.loaded.notes)
    for message in dict.fromkeys((*intake.warnings, *notes, *assembled.applied.warnings)):
        recorder.emit("warning", code="note", message=message, cure="")


def _evaluate_before(recorder: Recorder, assembled: assembly.Assembled) -> None:
    if assembled.evaluate is None:
        return
    start = time.perf_counter()
    measured = assembled.evaluate(assembled.plan.limit)
    seconds = time.perf_counter() - start
    recorder.emit("eval", step=0, metrics=measured.values, seconds=seconds, is_best=False)


def _work(job: Job, run: Run, recorder: Recorder, intake: Intake, assembled: assembly.Assembled) -> engine.Work:
    learning, rows = assembled.learning, intake.prepared.train.rows
    return engine.Work(
        run=run,
        recorder=recorder,
        objective=assembled.objective,
        source=assembled.source,
        strategy=assembled.strategy,
        plan=assembled.plan,
        learning_rate=LearningRate(
            learning.learning_rate, job.training.schedule, learning.warmup_steps, assembled.plan.steps
        ),
        policy=LoopPolicy(
            eval_every=job.training.eval_every,
            checkpoint_every=job.output.checkpoint_every,
            early_stopping=job.training.early_stopping,
        ),
        keep=job.output.keep,
        evaluate=assembled.evaluate,
        name_rows=lambda fed: ", ".join(
            rows.location(int(intake.train.rows[index])) for part in fed.group.micro_batches for index in part[:8]
        ),
    )


def _finish(
    run: Run,
    recorder: Recorder,
    job: Job,
    intake: Intake,
    assembled: assembly.Assembled,
    result: LoopResult,
) -> None:
    """Writes the finished model and says so."""
    assembled.objective.release()
    model = assembled.applied.model
    assembly.restore_frozen(job, intake, assembled)
    if intake.options.template is not None and job.data.template is not None:
        intake.tokenizer.tokenizer.chat_template = intake.options.template.source
    card = _card(run, job, intake, assembled, result.metrics)
    save_final(model, intake.tokenizer.tokenizer, run.model_path, card, base_folder=intake.folder)
    progress = result.progress
    recorder.emit(
        "done",
        step=progress.step,
        metrics=result.metrics,
        best_step=progress.best_step,
        model=str(run.model_path),
        train_seconds=progress.train_seconds,
        tokens=progress.tokens,
        data_wait_seconds=progress.wait_seconds,
        skipped_steps=progress.skipped_steps,
        gemm_share=assembly.gemm_share(assembled, progress.tokens, progress.train_seconds),
    )


def _card(run: Run, job: Job, intake: Intake, assembled: assembly.Assembled, after: Mapping[str, float]) -> CardFacts:
    training = job.training
    sources = [job.data.train] if isinstance(job.data.train, str) else job.data.train
    before = [event["metrics"] for event in run.events() if event["kind"] == "eval" and event["step"] == 0]
    return CardFacts(
        title=run.path.name,
        base_model=job.model.path,
        kind=intake.spec.kind,
        method=job.method.kind,
        method_description=assembled.applied.description,
        base_licence=intake.facts.licence,
        label_names=intake.spec.label_names,
        data={", ".join(Path(name).name for name in sources): len(intake.train)},
        settings={
            "batch size": training.batch_size,
            "epochs": training.epochs,
            "optimizer steps": assembled.plan.steps,
            "learning rate": assembled.learning.learning_rate,
            "schedule": training.schedule,
            "warm-up steps": assembled.learning.warmup_steps,
            "weight decay": training.weight_decay,
            "max length": assembled.learning.max_length,
            "seed": training.seed,
            "precision": assembled.compute.precision,
        },
        metrics_before=before[0] if before else {},
        metrics_after=after,
        notes=intake.facts.notes,
        run=str(run.path),
    )


def _check_done(run: Run) -> None:
    if run.status != "done":
        raise RunError(
            f"{run.path} is not finished (status: {run.status}).",
            cure=f"Go on with: {program()} resume {shell_path(run.path)}",
        )


def _spec_from(document: Mapping[str, Any]) -> TaskSpec:
    return TaskSpec(
        kind=document["kind"],
        text_columns=tuple(document["text_columns"]),
        label_columns=tuple(document["label_columns"]),
        label_names=tuple(document["label_names"]),
        chat_format=document["chat_format"],
    )


def _open_model(run: Run, spec: TaskSpec) -> Opened:
    model = run.job.model
    return open_final(
        run.model_path,
        spec,
        cache_dir=cache_folder(),
        base_model=model.path,
        trust_remote_code=model.trust_remote_code,
    )


def _load_language_model(path: str, device: torch.device) -> Predictor:
    """A model that was not trained here, to talk to before training."""
    folder = source.resolve(path, cache_dir=cache_folder())
    facts = read_facts(folder)
    if not facts.can_generate:
        raise ModelError(
            f"{path} is neither a run nor a language model.", cure="Name the run's folder, for instance runs/NAME."
        )
    tokenizer = model_load.load_tokenizer(folder)
    spec = TaskSpec(kind="instruction" if facts.has_chat_template else "language_modelling", text_columns=("text",))
    loaded = model_load.load_model(folder, facts, spec, pad_id=tokenizer.pad_id)
    options = tokenize.TokenizeOptions(max_length=facts.max_positions or 2048)
    return Predictor(loaded.model, tokenizer, spec, options, device)
