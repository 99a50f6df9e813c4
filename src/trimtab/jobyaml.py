"""YAML as job files use it: safe, small, without aliases, each key with its line; and the way back.

Scalars follow YAML 1.2 rather than 1.1: `1e-4` is a number and `0755` is text. `yes`, `no`, `on` and `off` are refused
because readers disagree about them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from trimtab.errors import JobError
from trimtab.text import safe

DEPTH_LIMIT = 20
REPORTED = object()
"""Stands in for a value whose problem is already in the list."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NULLS = frozenset(["", "~", "null", "Null", "NULL"])
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_AMBIGUOUS = frozenset(["yes", "no", "on", "off", "y", "n"])
_LONGEST_INT = 40

KeyPath = tuple[str, ...]
"""Where a key stands, for instance `("training", "seed")`."""


@dataclass(frozen=True)
class Problem:
    """One fault: `where` is `job.yaml:7` or an option, `cure` the edit that mends it (may be empty)."""

    where: str
    message: str
    cure: str = ""

    def line(self) -> str:
        return f"{self.where}: {self.message}" + (f" {self.cure}" if self.cure else "")


@dataclass
class Document:
    """What was written, where each key stands, and what is wrong with it already."""

    name: str = ""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    places: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    problems: list[Problem] = field(default_factory=list[Problem])


def parse(text: str, name: str) -> Document:
    """The mapping that `text` states. Faults of single keys are gathered in `problems`.

    Raises:
        JobError: no mapping, broken YAML, aliases, tags, deeper than 20 levels, forbidden characters.
    """
    document = Document(name=safe(name, limit=120))
    node = _compose(text, document.name)
    if node is None:
        raise JobError(
            f"{document.name} is empty.",
            cure="`trimtab init --model M --data D --output job.yaml` writes one to start from.",
        )
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single text"
        raise JobError(
            f"a job file is a mapping of sections (model:, data:, ...), this is {kind}.",
            cure="Start it with 'model:' and, indented below it, 'path: ...'.",
            location=f"{document.name}:{node.start_mark.line + 1}",
        )
    document.values = _mapping(node, (), document)
    return document


def parse_value(text: str, at: KeyPath, place: str) -> tuple[Any, list[Problem]]:
    """The value of one `--set` option, and its problems, all placed at `place`."""
    inner = Document(name=place)
    node = _compose(text, place)
    value = None if node is None else _value(node, at, inner)
    return value, [Problem(place, problem.message, problem.cure) for problem in inner.problems]


def plain(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means here; `text` itself when it is text."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", "")) if len(text) <= _LONGEST_INT else text
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return float(text.replace("_", ""))
    if _INFINITE.fullmatch(text):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text in (".nan", ".NaN", ".NAN") else text


def dump(value: Any) -> str:
    """YAML that `parse` reads back to equal values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31, indent=2)


def dump_value(value: Any) -> str:
    """One value on one line, as it would stand behind `key: `."""
    line = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, width=2**31, default_flow_style=True)
    return line.removesuffix("\n").removesuffix("\n...")


def dump_quoted(value: str) -> str:
    """A text in double quotes on one line."""
    return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=2**31).removesuffix("\n")


def _compose(text: str, name: str) -> yaml.Node | None:
    """The node tree; depth, anchors and tags are refused before it is built."""
    try:
        _check_events(text, name)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and not name.startswith("-") else ""
        raise JobError(
            f"not valid YAML: {_parser_words(error)}.", cure=_parser_cure(error), location=f"{name}{line}"
        ) from None
    except yaml.reader.ReaderError as error:
        raise JobError(
            "holds a control character, which YAML forbids.",
            cure="Remove it.",
            location=f"{name}:{text[: error.position].count(chr(10)) + 1}",
        ) from None


def _check_events(text: str, name: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        assert event.start_mark is not None
        where = f"{name}:{event.start_mark.line + 1}"
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_LIMIT:
            raise JobError(f"nested deeper than {DEPTH_LIMIT} levels.", cure="A job file needs three.", location=where)
        if isinstance(event, yaml.AliasEvent) or (isinstance(event, yaml.NodeEvent) and event.anchor is not None):
            raise JobError(
                "anchors (&) and aliases (*) are not allowed in a job file.",
                cure="Write the value out; text that starts with & or * needs quotes.",
                location=where,
            )
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            raise JobError(
                f"the tag {safe(str(event.tag), limit=60)} is not allowed in a job file.",
                cure="Write plain text or a number; text that starts with ! needs quotes.",
                location=where,
            )


def _parser_words(error: yaml.MarkedYAMLError) -> str:
    return safe(" ".join(str(part) for part in (error.problem, error.context) if part), limit=160)


def _parser_cure(error: yaml.MarkedYAMLError) -> str:
    words = f"{error.problem} {error.context}"
    if "'\\t'" in words:
        return "Indent with spaces, not with tabs."
    if "document" in words:
        return "A job file holds one document: remove the '---' in its middle."
    if "mapping values" in words:
        return "A text with ': ' in it needs quotes; keys of one section start in the same column."
    return "Check quotes, brackets and indentation on this line and the one before."


def _mapping(node: yaml.MappingNode, at: KeyPath, document: Document) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = f"{document.name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append(Problem(where, "a key must be a plain word.", "Write 'section:' or 'key: value'."))
            continue
        path = (*at, str(key_node.value))
        if path[-1] in values:
            first = document.places[path].rsplit(":", 1)[-1]
            message = f"{dotted(path)}: stands here and on line {first}."
            document.problems.append(Problem(where, message, "Remove one of the two."))
            continue
        document.places[path] = where
        values[path[-1]] = _value(value_node, path, document)
    return values


def _value(node: yaml.Node, at: KeyPath, document: Document) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, at, document)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, at, document) for item in node.value]
    text = str(node.value)
    if isinstance(node, yaml.ScalarNode) and node.style is not None:
        return text
    if text.lower() not in _AMBIGUOUS:
        return plain(text)
    truth = "true" if text.lower() in ("yes", "on", "y") else "false"
    document.problems.append(
        Problem(
            f"{document.name}:{node.start_mark.line + 1}",
            f"{dotted(at)}: {text} could be the text '{text}' or {truth}; YAML readers disagree.",
            f"Write '{text}' in quotes for the text, or {truth}.",
        )
    )
    return REPORTED


def dotted(path: KeyPath) -> str:
    return safe(".".join(path), limit=80)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `plain` would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    quoted = plain(value) is not value or value.lower() in _AMBIGUOUS or not value.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if quoted else None)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    if math.isfinite(value):
        shown = repr(value)
        # Readers of YAML 1.1 see a number only where there is a dot: 1e-05 becomes 1.0e-05.
        shown = shown if "." in shown else shown.replace("e", ".0e")
    else:
        shown = ".nan" if math.isnan(value) else f"{'-' * (value < 0)}.inf"
    return dumper.represent_scalar("tag:yaml.org,2002:float", shown)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)
