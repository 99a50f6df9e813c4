"""Job files: YAML and `--set key=value` into a checked Job, and a Job back into YAML.

Paths. What a job file reads (`model.path`, `data.train`, `data.eval`, `data.template`) is looked for beside the job
file, so that it works from any folder; on the command line, in the current folder. What it writes (`output.run`) always
goes to the current folder, as the default `runs/` does. A name that is no file there is kept: it may be a hub id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trimtab import jobproblems, jobyaml
from trimtab.errors import JobError, nearest
from trimtab.job import Job
from trimtab.jobyaml import Document, KeyPath, Problem
from trimtab.text import program, safe, shell_path

SIZE_LIMIT_BYTES = 1_000_000

_INPUT_KEYS = (("model", "path"), ("data", "train"), ("data", "eval"), ("data", "template"))
_TEMPLATE_NAMES = frozenset(["chatml", "alpaca", "plain"])
_FILE_ENDINGS = frozenset(
    [".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt", ".md", ".jinja", ".gguf", ".gz"]
)


def load_job(path: Path, overrides: Mapping[str, str] | None = None) -> Job:
    """The Job of a YAML file; `overrides` (dotted key to YAML text) win over it.

    Raises:
        JobError: with every problem of the file at once, each with its line.
    """
    document = jobyaml.parse(_read_text(path), path.name)
    _anchor(document.values, path.resolve().parent)
    _apply(document, overrides or {})
    return _check(document)


def job_from_flags(overrides: Mapping[str, str]) -> Job:
    """A Job made of dotted keys and YAML texts alone, for instance `{"model.path": "m", "data.train": "d.csv"}`."""
    document = Document()
    _apply(document, overrides)
    return _check(document)


def parse_job(text: str, name: str = "job.yaml", *, base: Path | None = None) -> Job:
    """The Job that YAML `text` states. `base`: the folder that input paths start from, if they shall be resolved."""
    document = jobyaml.parse(text, name)
    if base is not None:
        _anchor(document.values, base)
    return _check(document)


def dump_job(job: Job) -> str:
    """YAML with every key, defaults too, so that a later version with other defaults reads the same job.

    Of `method` only what was set: the keys of another method are errors, since they would have no effect.
    """
    values = job.model_dump(mode="python")
    values["method"] = {"kind": job.method.kind, **job.method.model_dump(mode="python", exclude_unset=True)}
    return jobyaml.dump(values)


def check_sections(settings: Mapping[str, Any], name: str) -> None:
    """Holds settings given in Python under the names of `training`, `machine` and `output` to the job file's rules.

    Names that these sections do not have are passed over. `name` is who takes them, for messages.

    Raises:
        JobError: with every problem at once.
    """
    given = {"model": {"path": name}, "data": {"train": name}} | {
        section: {key: settings[key] for key in jobproblems.section_model(section).model_fields if key in settings}
        for section in ("training", "machine", "output")
    }
    _check(Document(values=given, name=name))


def quoted(value: str) -> str:
    """`value` in double quotes: read back as exactly this text, alone as an override or inside a YAML list."""
    return jobyaml.dump_quoted(value)


# ---------------------------------------------------------------------------------------------------------------- file


def _read_text(path: Path) -> str:
    name = safe(str(path), limit=200)
    if path.suffix.lower() in _FILE_ENDINGS:
        raise JobError(
            f"{name} is no job file (.yaml).",
            cure=f"For data: {program()} train --model MODEL --data {shell_path(path)}",
        )
    if path.is_dir():
        found = sorted(item.name for item in path.iterdir() if item.suffix in (".yaml", ".yml"))
        hint = f"Name the file, for instance {safe(found[0], limit=80)}." if found else "It holds no .yaml file."
        raise JobError(f"{name} is a folder, not a job file.", cure=hint)
    try:
        with path.open("rb") as stream:
            raw = stream.read(SIZE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise JobError(f"there is no job file {name}.", cure=_near_files(path)) from None
    except OSError as error:
        raise JobError(f"{name} cannot be read: {error.strerror}.", cure="Check its permissions.") from error
    if len(raw) > SIZE_LIMIT_BYTES:
        raise JobError(
            f"{name} is larger than {SIZE_LIMIT_BYTES:,} bytes, the limit of a job file.",
            cure="Name data files under data.train instead of writing data into the job file.",
        )
    return _decode(raw, name)


def _decode(raw: bytes, name: str) -> str:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise JobError(f"{name} is UTF-16 text.", cure="Save it as UTF-8.")
    if b"\x00" in raw:
        raise JobError(f"{name} is a binary file, not YAML.", cure="`trimtab init` writes a job file to start from.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"byte {raw[error.start]:#04x} is not UTF-8."
        raise JobError(message, cure="Save the file as UTF-8.", location=f"{name}:{line}") from None
    return text.replace("\r\n", "\n")


def _near_files(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"There is no folder {safe(str(folder), limit=200)} either."
    guess = nearest(path.name, [item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml")])
    if guess:
        return f"Did you mean {safe(str(folder / guess), limit=200)}?"
    return "`trimtab init --model M --data D --output job.yaml` writes one."


# ----------------------------------------------------------------------------------------------------------- overrides


def _apply(document: Document, overrides: Mapping[str, str]) -> None:
    for key, text in overrides.items():
        path = tuple(key.strip().split("."))
        place = f"--set {safe(key, limit=80)}"
        if len(path) != 2:
            guess = jobproblems.guess_key(path[-1])
            message = f"'{safe(key, limit=80)}' is not a key; keys look like training.epochs."
            document.problems.append(Problem(place, message, f"Did you mean '{guess}'?" if guess else ""))
            continue
        value, problems = _override_value(path, text, place)
        document.problems += problems
        one: dict[str, Any] = {path[0]: {path[1]: value}}
        _anchor(one, Path.cwd())
        section = document.values.get(path[0])
        document.values[path[0]] = {**section, **one[path[0]]} if isinstance(section, dict) else one[path[0]]
        document.places[path] = place
        if path[0] not in Job.model_fields:
            document.places[path[:1]] = place


def _override_value(path: KeyPath, text: str, place: str) -> tuple[Any, list[Problem]]:
    bare = not text.lstrip().startswith(("'", '"', "["))
    if bare and jobproblems.is_text_only(path) and jobyaml.plain(text) is not None:
        return text, []  # The shell has eaten the quotes: `--set output.run=2024` can only mean the text.
    return jobyaml.parse_value(text, path, place)


def _anchor(values: dict[str, Any], base: Path) -> None:
    """Make input paths absolute: those that exist under `base`, and those that can only be files."""
    for section, key in _INPUT_KEYS:
        group = values.get(section)
        if not isinstance(group, dict) or key not in group:
            continue
        value = group[key]
        if isinstance(value, str):
            group[key] = _anchored(value, base, key)
        elif isinstance(value, list):
            group[key] = [_anchored(item, base, key) if isinstance(item, str) else item for item in value]


def _anchored(value: str, base: Path, key: str) -> str:
    if not value.strip() or "\x00" in value or (key == "template" and value in _TEMPLATE_NAMES):
        return value
    path = Path(value)
    if value == "~" or value.startswith(("~/", "~\\")):
        path = path.expanduser()
    file_like = value.startswith((".", "~")) or path.is_absolute() or path.suffix.lower() in _FILE_ENDINGS
    try:
        return str((base / path).absolute()) if file_like or (base / path).exists() else value
    except OSError:
        return value


# --------------------------------------------------------------------------------------------------------------- check


def _check(document: Document) -> Job:
    values = {name: {} if value is None else value for name, value in document.values.items()}
    problems = list(document.problems)
    try:
        job = Job.model_validate(values)
    except ValidationError as error:
        problems += jobproblems.explain(error, values, document.places, document.name)
    else:
        problems += jobproblems.not_finite(job, document.places, document.name)
        if not problems:
            return job
    raise jobproblems.as_error(problems, document.name)
