"""What is wrong with a job, in our own sentences: which key, what it holds, what it should hold, what to write."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trimtab.errors import JobError, nearest
from trimtab.job import Job, Section, known_keys
from trimtab.jobyaml import REPORTED, KeyPath, Problem, dotted, plain
from trimtab.text import safe

SHOWN_PROBLEMS = 20

_EXAMPLES = {
    "training.learning_rate": "2e-4",
    "training.max_length": "256",
    "training.max_steps": "100",
    "training.eval_every": "100",
    "training.early_stopping": "3",
    "method.alpha": "32",
    "method.last_layers": "2",
    "model.dropout": "0.1",
    "machine.micro_batch": "4",
    "machine.threads": "2",
    "output.checkpoint_every": "100",
}
# What other tools call our keys.
_SYNONYMS = {
    "lr": "training.learning_rate",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "num_train_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "per_device_train_batch_size": "training.batch_size",
    "micro_batch_size": "machine.micro_batch",
    "warmup_ratio": "training.warmup",
    "warmup_steps": "training.warmup",
    "max_seq_length": "training.max_length",
    "cutoff_len": "training.max_length",
    "lora_r": "method.rank",
    "lora_rank": "method.rank",
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "target": "data.label",
    "labels": "data.label",
    "test": "data.eval",
    "validation": "data.eval",
    "output_dir": "output.run",
    "bf16": "machine.precision",
    "fp16": "machine.precision",
    "lr_scheduler_type": "training.schedule",
}
_NOT_NEEDED = {
    "gradient_accumulation_steps": "Nothing to set: training.batch_size counts the examples of one optimizer step.",
    "gradient_checkpointing": "Nothing to set: the planner decides it.",
}


@dataclass(frozen=True)
class _Accepts:
    """What a field takes, from its annotation."""

    kinds: frozenset[str]
    """Of `text`, `int`, `float`, `bool`, `list`, `none`, `section`."""
    words: tuple[str, ...] = ()
    """The values of its Literals."""
    items: str = ""
    """What its list holds: `text` or `float`."""

    def described(self) -> str:
        parts: list[str] = []
        if self.words:
            parts.append("one of " * (len(self.words) > 1) + ", ".join(self.words))
        if "text" in self.kinds and not self.words:
            parts.append("text")
        if "float" in self.kinds:
            parts.append("a number")
        elif "int" in self.kinds:
            parts.append("a whole number")
        if "bool" in self.kinds:
            parts.append("true or false")
        if "list" in self.kinds:
            parts.append("a list of " + ("numbers" if self.items == "float" else "texts"))
        return " or ".join(parts)


def as_error(problems: Sequence[Problem], name: str) -> JobError:
    """All problems in one error, in the order of the file."""
    ordered = [_once(problem) for problem in sorted(problems, key=_line_number)]
    if len(ordered) == 1:
        return JobError(ordered[0].message, cure=ordered[0].cure, location=ordered[0].where)
    lines = [problem.line() for problem in ordered[:SHOWN_PROBLEMS]]
    if len(ordered) > SHOWN_PROBLEMS:
        lines.append(f"... and {len(ordered) - SHOWN_PROBLEMS} more.")
    return JobError("\n".join([f"{len(ordered)} problems{f' in {name}' if name else ''}:", *lines]))


def _once(problem: Problem) -> Problem:
    """`--set KEY: KEY: ...` names its key once."""
    key = problem.where.removeprefix("--set ")
    return replace(problem, message=problem.message.removeprefix(f"{key}: ")) if key != problem.where else problem


def _line_number(problem: Problem) -> int:
    tail = problem.where.rsplit(":", 1)[-1]
    return int(tail) if tail.isdigit() else 10**9


def explain(
    error: ValidationError, values: Mapping[str, Any], places: Mapping[KeyPath, str], name: str
) -> list[Problem]:
    """One Problem for each key that pydantic refused."""
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(tuple(str(part) for part in detail["loc"][:2]), []).append(detail)
    problems: list[Problem] = []
    misspelt = {guess_key(path[1], path[0]) for path, details in by_key.items() if _is_unknown(path, details)}
    for path, details in by_key.items():
        value = _value_at(values, path)
        if value is REPORTED or (details[0]["type"] == "missing" and dotted(path) in misspelt):
            continue
        problems += _explain_key(path, value, details, places, name)
    return problems


def _is_unknown(path: KeyPath, details: Sequence[ErrorDetails]) -> bool:
    return len(path) == 2 and details[0]["type"] == "extra_forbidden"


def _explain_key(
    path: KeyPath, value: Any, details: Sequence[ErrorDetails], places: Mapping[KeyPath, str], name: str
) -> Iterator[Problem]:
    where = places.get(path) or places.get(path[:1]) or name or "command line"
    kind = details[0]["type"]
    if kind == "missing":
        for missing in _required_below(path):
            yield Problem(where, f"{missing} is missing.", _cure_missing(missing))
    elif kind == "extra_forbidden":
        yield Problem(
            where, f"{dotted(path)}: there is no such key.", _cure_unknown(path, whole=where.startswith("--set "))
        )
    elif len(path) == 1:
        yield Problem(
            where, f"{dotted(path)}: a section holds keys below it, not {shown(value)}.", _cure_section(path[0])
        )
    else:
        message, cure = _sentence(path, value, details)
        yield Problem(where, f"{dotted(path)}: {message}", cure)


def not_finite(job: Job, places: Mapping[KeyPath, str], name: str) -> list[Problem]:
    """Infinite or NaN numbers, which no limit of the model catches."""
    problems: list[Problem] = []
    for section, group in job.model_dump().items():
        for key, value in group.items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                path = (section, key)
                message = f"{dotted(path)}: {shown(value)} is not a finite number."
                problems.append(Problem(places.get(path, name), message, _use(path)))
    return problems


def guess_key(word: str, section: str = "") -> str | None:
    """The dotted key that `word` was most likely meant to be."""
    keys = list(known_keys())
    if section:
        own = [key.split(".")[1] for key in keys if key.startswith(f"{section}.")]
        found = nearest(word, own)
        if found:
            return f"{section}.{found}"
    if word in _SYNONYMS:
        return _SYNONYMS[word]
    found = nearest(word, [key.split(".")[1] for key in keys])
    return next((key for key in keys if key.split(".")[1] == found), None) if found else None


def is_text_only(path: KeyPath) -> bool:
    """Whether the key takes text (or lists of it) and neither numbers nor true and false."""
    field = _field(path)
    if field is None:
        return False
    accepts = _accepts(field.annotation)
    return "text" in accepts.kinds and not accepts.kinds & {"int", "float", "bool"} and accepts.items != "float"


def shown(value: Any) -> str:
    """A value as it would be written, cut short and safe to print."""
    if isinstance(value, str):
        return safe(f"'{value}'", limit=60)
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "keys of its own"
    return safe(str(value), limit=60)


# ----------------------------------------------------------------------------------------------------------- sentences


def _sentence(path: KeyPath, value: Any, details: Sequence[ErrorDetails]) -> tuple[str, str]:
    field = _field(path)
    assert field is not None, path
    accepts = _accepts(field.annotation)
    if isinstance(value, list) and "list" in accepts.kinds:
        return _item_sentence(details, accepts)
    for detail in details:
        limit = _limit_sentence(detail, value)
        if limit:
            return limit, _use(path)
    if isinstance(value, str) and not value.strip():
        return "is blank.", "Give a value, or remove the key."
    if isinstance(value, list):
        return f"a list is not {accepts.described()}.", "Write a single value."
    if value is None:
        return f"is empty, {accepts.described()} is needed.", _use(path)
    return _type_sentence(path, value, accepts)


def _type_sentence(path: KeyPath, value: Any, accepts: _Accepts) -> tuple[str, str]:
    number_wanted = bool(accepts.kinds & {"int", "float"})
    if isinstance(value, str) and number_wanted and isinstance(plain(value), (int, float)):
        return f"{shown(value)} in quotes is text, {accepts.described()} is needed.", f"Write {value} without quotes."
    if isinstance(value, str) and accepts.words:
        guess = nearest(value, accepts.words)
        return f"{shown(value)} is not {accepts.described()}.", f"Did you mean '{guess}'?" if guess else _use(path)
    if isinstance(value, float) and value.is_integer() and "int" in accepts.kinds:
        return f"{value} is not a whole number.", f"Write {int(value)}."
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and "text" in accepts.kinds
        and not accepts.words
    ):
        return f"{value} is a number, {accepts.described()} is needed.", f"Put it in quotes: '{value}'."
    if isinstance(value, str) and "bool" in accepts.kinds:
        return f"{shown(value)} is text, true or false is needed.", "Write true or false without quotes."
    return f"{shown(value)} is not {accepts.described()}.", _use(path)


def _item_sentence(details: Sequence[ErrorDetails], accepts: _Accepts) -> tuple[str, str]:
    wanted = "a number" if accepts.items == "float" else "text"
    for detail in details:
        position = next((part for part in detail["loc"][2:] if isinstance(part, int)), None)
        if position is None:
            continue
        item = detail["input"]
        if isinstance(item, str) and not item.strip():
            return f"item {position + 1} of the list is blank.", "Remove it."
        cure = f"Put it in quotes: '{item}'." if wanted == "text" and isinstance(item, (int, float)) else "Correct it."
        return f"item {position + 1} of the list is {shown(item)}, {wanted} is needed.", cure
    return "the list is not accepted.", "Correct it."


def _limit_sentence(detail: ErrorDetails, value: Any) -> str:
    context = detail.get("ctx", {})
    number = shown(value)
    if isinstance(value, float) and math.isnan(value):
        return "nan is not a finite number."
    sentences = {
        "greater_than": lambda: f"{number} is not above {context['gt']:g}.",
        "greater_than_equal": lambda: f"{number} is below {context['ge']:g}, the smallest value allowed.",
        "less_than": lambda: f"{number} is not below {context['lt']:,.12g}.",
        "less_than_equal": lambda: f"{number} is above {context['le']:,.12g}, the largest value allowed.",
    }
    sentence = sentences.get(detail["type"])
    return sentence() if sentence else ""


def _use(path: KeyPath) -> str:
    """`Use e.g. 2e-4.` or the default."""
    key = ".".join(path)
    if key in _EXAMPLES:
        return f"Use e.g. {_EXAMPLES[key]}."
    field = _field(path)
    if field is None or field.is_required():
        return ""
    return (
        "Correct it, or remove the key."
        if field.default is None
        else f"The default is {shown(field.default).strip(chr(39))}."
    )


def _cure_missing(key: str) -> str:
    return {
        "model.path": "Give --model FOLDER_OR_HUB_ID, or write 'path:' below 'model:'.",
        "data.train": "Give --data FILE, or write 'train:' below 'data:'.",
    }.get(key, f"Set {key}.")


def _cure_unknown(path: KeyPath, *, whole: bool) -> str:
    """`whole`: with the section, as `--set` needs it."""
    word = path[-1]
    if word in _NOT_NEEDED:
        return _NOT_NEEDED[word]
    if len(path) == 1:
        section = nearest(word, Job.model_fields)
        guess = section if section and word not in _SYNONYMS else guess_key(word)
    else:
        guess = guess_key(word, path[0])
    if not guess:
        listing = Job.model_fields if len(path) == 1 else section_model(path[0]).model_fields
        return f"Known: {', '.join(listing)}."
    own = guess.split(".")[-1] if guess.startswith(f"{path[0]}.") and not whole else guess
    return f"Did you mean '{own}'?"


def _cure_section(section: str) -> str:
    first = next(iter(section_model(section).model_fields))
    return f"Write '{section}:' and below it, indented, for instance '{first}: ...'."


def _value_at(values: Mapping[str, Any], path: KeyPath) -> Any:
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found


# --------------------------------------------------------------------------------------------------------- annotations


def section_model(name: str) -> type[Section]:
    """The model of a section of the job file."""
    annotation = Job.model_fields[name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, Section)
    return annotation


def _field(path: KeyPath) -> FieldInfo | None:
    if len(path) != 2 or path[0] not in Job.model_fields:
        return None
    return section_model(path[0]).model_fields.get(path[1])


def _required_below(path: KeyPath) -> list[str]:
    if len(path) == 2:
        return [".".join(path)]
    return [f"{path[0]}.{name}" for name, field in section_model(path[0]).model_fields.items() if field.is_required()]


def _accepts(annotation: Any) -> _Accepts:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _accepts(arguments[0])
    if origin is typing.Literal:
        return _Accepts(frozenset(["text"]), tuple(str(word) for word in arguments))
    if origin is list:
        return _Accepts(
            frozenset(["list"]), items="float" if _accepts(arguments[0]).kinds & {"int", "float"} else "text"
        )
    if origin in (typing.Union, types.UnionType):
        parts = [_accepts(argument) for argument in arguments]
        return _Accepts(
            frozenset[str]().union(*(part.kinds for part in parts)),
            tuple(dict.fromkeys(word for part in parts for word in part.words)),
            next((part.items for part in parts if part.items), ""),
        )
    names: dict[Any, str] = {str: "text", int: "int", float: "float", bool: "bool", type(None): "none"}
    return _Accepts(frozenset([names.get(annotation, "section")]))
