"""From a job to token stores: model facts, rows, examples, tokens, and the truth report. Loads no weights.

Each stage reads what the one before wrote, so everything a user got wrong in data or settings is said before the model
is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import platformdirs

from trimtab.data import examples, formats, report, tokenize
from trimtab.data.task import TaskSpec
from trimtab.job import DataSection, Job
from trimtab.models import load, source
from trimtab.models.facts import ModelFacts, read_facts
from trimtab.planning.effects import refuse_without_effect

Phase = Callable[[str, int, int], None]
"""`phase(name, done, total)` tells how far a stage is."""

_MANY_UNKNOWN = 0.1
_SAMPLED_EXAMPLES = 1000


@dataclass(frozen=True)
class Intake:
    """What training needs to know of model and data."""

    folder: Path
    """The model as an ordinary transformers folder."""
    facts: ModelFacts
    tokenizer: load.LoadedTokenizer
    prepared: examples.Prepared
    options: tokenize.TokenizeOptions
    max_length_reason: str
    train: tokenize.TokenStore
    eval: tokenize.TokenStore | None
    report: report.DataReport

    @property
    def spec(self) -> TaskSpec:
        return self.prepared.spec

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the data, one sentence each."""
        share = unknown_share(self.train, self.tokenizer.tokenizer.unk_token_id)
        if share < _MANY_UNKNOWN:
            return self.prepared.warnings
        unreadable = f"{share:.0%} of the tokens are unknown to this model's tokenizer, which cannot tell them apart."
        return (*self.prepared.warnings, f"{unreadable} A model made for the language of the data will do better.")

    @property
    def digest(self) -> str:
        """Hash of what is trained and measured on; the best checkpoint depends on both."""
        digests = [self.train.digest, *([] if self.eval is None else [self.eval.digest])]
        return hashlib.sha256(" ".join(digests).encode("ascii")).hexdigest()


def unknown_share(store: tokenize.TokenStore, unknown_id: int | None) -> float:
    """Share of unknown tokens in the first examples."""
    if unknown_id is None:
        return 0.0
    ids = store.tokens(range(min(len(store), _SAMPLED_EXAMPLES))).ids
    return float((ids == unknown_id).mean())


def cache_folder() -> Path:
    """Where converted models, parsed data and tokens are kept between runs: the user's own cache folder."""
    return Path(platformdirs.user_cache_dir("trimtab", appauthor=False))


def take_in(job: Job, *, cache_dir: Path, phase: Phase = lambda name, done, total: None) -> Intake:
    """Reads model facts and data, and tokenises. Raises DataError, JobError or ModelError for what does not fit."""
    trusted = job.model.trust_remote_code
    folder = source.resolve(job.model.path, cache_dir=cache_dir, trust_remote_code=trusted)
    facts = read_facts(folder, trust_remote_code=trusted)
    train_rows = read(job.data.train, job.data, cache_dir, phase)
    eval_rows = None if job.data.eval is None else read(job.data.eval, job.data, cache_dir, phase)
    prepared = examples.prepare(job, train_rows, eval_rows, hints(facts))
    refuse_without_effect(job, prepared.spec.kind, has_evaluation=prepared.eval is not None)
    tokenizer = load.load_tokenizer(folder, trust_remote_code=trusted)
    options = tokenize_options(job, prepared.spec, facts, tokenizer.tokenizer)
    parts = {"train": prepared.train, "eval": prepared.eval}
    stores = {
        name: tokenize.tokenize(
            part,
            prepared.spec,
            tokenizer.tokenizer,
            options,
            cache_dir=cache_dir,
            on_progress=partial(phase, f"tokenise {name}"),
        )
        for name, part in parts.items()
        if part is not None and len(part)
    }
    train = stores["train"]
    _, reason = tokenize.choose_max_length(
        train.stats.original_lengths, facts.max_positions, prepared.spec.kind, job.training.max_length
    )
    return Intake(
        folder=folder,
        facts=facts,
        tokenizer=tokenizer,
        prepared=prepared,
        options=options,
        max_length_reason=reason,
        train=train,
        eval=stores.get("eval"),
        report=report.build_report(prepared, train, stores.get("eval"), tokenizer.tokenizer, options),
    )


def read(sources: str | Sequence[str], data: DataSection, cache_dir: Path, phase: Phase) -> formats.Rows:
    """Rows of one or several data sources."""
    listed = [sources] if isinstance(sources, str) else list(sources)
    return formats.read_rows(
        listed,
        encoding=data.encoding,
        cache_dir=cache_dir,
        on_progress=partial(phase, "read"),
    )


def hints(facts: ModelFacts) -> examples.ModelHints:
    """What the data side may know of a model."""
    return examples.ModelHints(
        is_decoder=facts.is_decoder,
        can_generate=facts.can_generate,
        label_names=facts.label_names,
        has_chat_template=facts.has_chat_template,
        model_type=facts.model_type,
    )


def tokenize_options(job: Job, spec: TaskSpec, facts: ModelFacts, tokenizer: Any) -> tokenize.TokenizeOptions:
    """How this job's examples become tokens."""
    longest, _ = tokenize.choose_max_length(None, facts.max_positions, spec.kind, job.training.max_length)
    template = tokenize.chat_template(job.data.template, tokenizer) if spec.kind == "instruction" else None
    return tokenize.TokenizeOptions(
        max_length=longest, template=template, answer_marker=job.data.answer_marker, loss_on=job.task.loss_on
    )
