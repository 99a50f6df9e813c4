"""The model card (README.md) of a finished model: what it is, how it was made, what it reached, how to load it.

Names and numbers come from data, folders and other people's cards, so all text is escaped for Markdown and YAML.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

from trimtab.job import MethodKind, TaskKind
from trimtab.models.heads import auto_class_name
from trimtab.text import safe
from trimtab.units import format_count

_PIPELINES: dict[TaskKind, str] = {
    "classification": "text-classification",
    "multilabel_classification": "text-classification",
    "regression": "text-classification",
    "token_classification": "token-classification",
    "language_modelling": "text-generation",
    "instruction": "text-generation",
}
_PACKAGES = ("trimtab", "torch", "transformers", "peft", "tokenizers")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#+!|~&-])")
LABEL_LIMIT = 50


@dataclass(frozen=True)
class CardFacts:
    """What the card says."""

    title: str
    base_model: str
    """As the job names it: hub id, folder or GGUF file."""
    kind: TaskKind
    method: MethodKind
    method_description: str
    """`Applied.description`."""
    base_licence: str | None = None
    label_names: Sequence[str] = ()
    data: Mapping[str, int] = field(default_factory=lambda: {})
    """Name of each data source and the examples used of it."""
    settings: Mapping[str, object] = field(default_factory=lambda: {})
    """What was learned, in the order to show: batch size, epochs, learning rate, seed ..."""
    metrics_before: Mapping[str, float] = field(default_factory=lambda: {})
    metrics_after: Mapping[str, float] = field(default_factory=lambda: {})
    notes: Sequence[str] = ()
    """One sentence each, such as `ModelFacts.notes`."""
    run: str = "RUN"
    """The Run folder, for the command that uses the model."""


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that made the model, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def model_card(facts: CardFacts) -> str:
    """The whole README.md."""
    parts = [
        _front_matter(facts),
        f"# {markdown(facts.title)}",
        f"{markdown(_base_name(facts.base_model))}, fine-tuned with Trimtab for {facts.kind.replace('_', ' ')}."
        f" {markdown(facts.method_description)}",
        _labels(facts.label_names),
        _section("Results on held-out data", _metrics(facts)),
        _section("Use it", _usage(facts)),
        _section("Data", _table(("source", "examples"), [(n, f"{c:,}") for n, c in facts.data.items()])),
        _section("Settings", _table(("setting", "value"), [(n, _value(v)) for n, v in facts.settings.items()])),
        _section("Licence", _licence(facts)),
        _section("Notes", "\n".join(f"- {markdown(note)}" for note in facts.notes)),
        _section("Made with", _table(("package", "version"), list(installed_versions().items()))),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown(text: str, *, limit: int = 300) -> str:
    """`text` on one line, so that Markdown and HTML show it as it is."""
    return _MARKDOWN.sub(r"\\\1", safe(text, limit=limit))


def yaml_text(text: str, *, limit: int = 300) -> str:
    """`text` as a double-quoted YAML scalar on one line."""
    return json.dumps(safe(text, limit=limit), ensure_ascii=False)


def _front_matter(facts: CardFacts) -> str:
    lines = ["---", f"library_name: {'peft' if facts.method == 'lora' else 'transformers'}"]
    lines.append(f"pipeline_tag: {_PIPELINES[facts.kind]}")
    if facts.base_licence:
        lines.append(f"license: {yaml_text(facts.base_licence, limit=80)}")
    if _is_hub_id(facts.base_model):
        lines.append(f"base_model: {yaml_text(facts.base_model)}")
    lines += ["tags:", "- trimtab", f"- {facts.kind.replace('_', '-')}", "---"]
    return "\n".join(lines)


def _is_hub_id(name: str) -> bool:
    """`owner/name`; anything else is a place on someone's disk, which the hub could not link."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def _base_name(name: str) -> str:
    """The hub id, or the last part of a path: a card tells nobody's folders."""
    return name if _is_hub_id(name) else re.split(r"[\\/]", name.rstrip("\\/"))[-1]


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _labels(names: Sequence[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(markdown(name, limit=80) for name in names[:LABEL_LIMIT])
    more = f" and {len(names) - LABEL_LIMIT} more" if len(names) > LABEL_LIMIT else ""
    return f"Labels: {shown}{more}."


def _metrics(facts: CardFacts) -> str:
    names = list(dict.fromkeys([*facts.metrics_after, *facts.metrics_before]))
    before = bool(facts.metrics_before)
    header = ("metric", "before", "after") if before else ("metric", "after")
    rows = [
        tuple(_metric(side.get(name)) for side in (facts.metrics_before, facts.metrics_after)[0 if before else 1 :])
        for name in names
    ]
    return _table(header, [(name, *row) for name, row in zip(names, rows, strict=True)])


def _metric(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return format_count(value) if value >= 10_000_000 else str(value)
    return ", ".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(markdown(str(cell)) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _usage(facts: CardFacts) -> str:
    command = "chat" if facts.kind == "instruction" else "predict"
    file = "" if command == "chat" else " texts.txt"
    run = shlex.quote(safe(facts.run, limit=300)).replace("`", "")
    python = _python_lora(facts) if facts.method == "lora" else _python_plain(facts)
    shell = f"```sh\ntrimtab {command} {run}{file}\n```"
    return f"{shell}\n\nOr in Python, `FOLDER` being the folder of this file:\n\n{python}"


def _python_plain(facts: CardFacts) -> str:
    name = auto_class_name(facts.kind)
    return _code(
        f"from transformers import AutoTokenizer, {name}",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {name}.from_pretrained("FOLDER")',
    )


def _python_lora(facts: CardFacts) -> str:
    name = auto_class_name(facts.kind)
    return _code(
        "from peft import PeftModel",
        f"from transformers import AutoConfig, AutoTokenizer, {name}",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        'config = AutoConfig.from_pretrained("FOLDER")  # the base model with the labels of this task',
        f'base = {name}.from_pretrained("BASE", config=config)  # "base_model_name_or_path" in adapter_config.json',
        'model = PeftModel.from_pretrained(base, "FOLDER")',
    )


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _licence(facts: CardFacts) -> str:
    base = markdown(_base_name(facts.base_model))
    if not facts.base_licence:
        return f"The folder of {base} names no licence; look it up before you pass this model on."
    return f"{markdown(facts.base_licence, limit=80)}, as {base}. The data may have terms of its own."
