"""Which task a table is for: by the job, by column names and types, and by the label values. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trimtab.data import chat, rowstore
from trimtab.data.formats import Rows
from trimtab.data.labels import flag_of, is_number, label_name
from trimtab.data.task import LANGUAGE_KINDS, TaskSpec
from trimtab.errors import DataError, JobError, did_you_mean
from trimtab.job import Job, TaskKind
from trimtab.text import safe

FEW_NUMBERS = 20
"""Up to so many different whole numbers are classes."""

_TEXT_NAMES = (
    "text", "sentence", "content", "review", "question", "tweet", "comment", "body", "document", "utterance",
    "message", "query", "description", "headline", "title", "input", "prompt",
    "文本", "内容", "评论", "正文", "句子", "问题", "标题",
)  # fmt: skip
_PAIRS = (
    ("text1", "text2"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "answer"), ("texta", "textb"), ("sentencea", "sentenceb"), ("question", "sentence"),
    ("query", "passage"), ("query", "document"), ("question", "context"),
)  # fmt: skip
_LABEL_NAMES = (
    "label", "labels", "class", "category", "target", "score", "rating", "stars", "sentiment", "topic", "intent",
    "polarity", "tag", "tags", "genre", "emotion",
    "标签", "类别", "分类", "情感", "评分", "分数",
)  # fmt: skip
_CLASS_LIKE = ("label", "labels", "class", "category", "target", "topic", "intent", "tag", "标签", "类别", "分类")
_TOKEN_NAMES = ("tokens", "words")
_TAG_NAMES = ("tags", "nertags", "labels", "label", "postags", "chunktags")


@dataclass(frozen=True)
class ModelHints:
    """What a model's config says that helps to tell the task."""

    is_decoder: bool
    can_generate: bool
    label_names: tuple[str, ...] = ()
    """Class names that the config already has (a fine-tuned classifier), else empty."""
    has_chat_template: bool = False
    model_type: str = ""


def column_type(rows: Rows, name: str) -> str:
    """`text`, `number`, `flag`, `list`, `object`, `mixed`, `empty` or `other`."""
    one = rows.stored.schema.field(name)
    if rowstore.is_json(one):
        return "mixed"
    tests = {
        "text": pa.types.is_string,
        "flag": pa.types.is_boolean,
        "number": lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind),
        "list": pa.types.is_list,
        "object": pa.types.is_struct,
        "empty": pa.types.is_null,
    }
    return next((word for word, test in tests.items() if test(one.type)), "other")


def infer(job: Job, rows: Rows, model: ModelHints) -> TaskSpec:
    """The task without its label names, which only the values tell.

    Raises:
        JobError: the job names a column that is not there, or settings that contradict the data or the model.
        DataError: the columns tell no task.
    """
    finder = _Finder(job, rows, model)
    spec = finder.given(job.task.kind) if job.task.kind is not None else finder.told()
    if spec.kind in LANGUAGE_KINDS and not model.is_decoder:
        raise JobError(
            f"task {spec.kind} needs a model that writes text; {model.model_type or 'this one'} reads it only.",
            cure="Name a decoder in model.path, or set task.kind: classification with a label column.",
        )
    return spec


def check_columns(spec: TaskSpec, rows: Rows, what: str) -> None:
    """Raises DataError when rows (for instance of `data.eval`) lack a column of the task."""
    optional = ("input", "history", "system") if spec.chat_format is not None else ()
    for name in (*spec.text_columns, *spec.label_columns):
        if name not in rows.columns and name not in optional:
            raise DataError(
                f"{what} has no column '{safe(name, limit=60)}', which the training data has.",
                cure=did_you_mean(name, rows.columns),
                location=rows.files[0],
            )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9\u0080-\uffff]", "", name.casefold())


class _Finder:
    """Looks for the columns of a task."""

    def __init__(self, job: Job, rows: Rows, model: ModelHints) -> None:
        self._rows = rows
        self._model = model
        self._by_plain = {_plain(name): name for name in reversed(rows.columns)}
        self._text = self._named(job.data.text, "data.text")
        self._label = self._named(job.data.label, "data.label")

    def _named(self, wish: str | list[str] | None, key: str) -> tuple[str, ...]:
        """Columns that the job names; the same letters in another case will do."""
        names = [wish] if isinstance(wish, str) else list(wish or [])
        for name in names:
            if name not in self._rows.columns:
                raise JobError(
                    f"{key}: {self._rows.files[0]} has no column '{safe(name, limit=60)}'.",
                    cure=did_you_mean(name, [safe(one, limit=60) for one in self._rows.columns[:30]]),
                )
        if key == "data.text" and len(names) > 2:
            raise JobError(f"data.text names {len(names)} columns.", cure="Name one, or two for a pair.")
        return tuple(names)

    def _found(self, names: Iterable[str], types: Sequence[str]) -> str | None:
        """The first column with one of these names and types, else one that has such a name among its words."""
        for name in names:
            column = self._by_plain.get(name)
            if column is not None and column_type(self._rows, column) in types:
                return column
        wanted = set(names)
        for column in self._rows.columns:
            words = re.split(r"[^a-z0-9]+", column.casefold())
            if wanted.intersection(words) and column_type(self._rows, column) in types:
                return column
        return None

    def _pair(self) -> tuple[str, ...]:
        for first, second in _PAIRS:
            pair = (self._by_plain.get(first, ""), self._by_plain.get(second, ""))
            if all(name and column_type(self._rows, name) in ("text", "mixed") for name in pair):
                return pair
        return ()

    def _text_columns(self, besides: Sequence[str]) -> tuple[str, ...]:
        """Given by the job, a pair, a column by its name, or the only column of text beside the labels."""
        if self._text:
            return self._text
        pair = self._pair()
        if pair and not set(pair) & set(besides):
            return pair
        found = self._found(_TEXT_NAMES, ("text", "mixed"))
        if found is not None and found not in besides:
            return (found,)
        texts = [name for name in self._rows.columns if name not in besides and column_type(self._rows, name) == "text"]
        return (texts[0],) if len(texts) == 1 and (besides or len(self._rows.columns) == 1) else ()

    def _label_columns(self) -> tuple[str, ...]:
        if self._label:
            return self._label
        found = self._found(_LABEL_NAMES, ("text", "number", "flag", "list", "mixed", "empty"))
        return (found,) if found is not None and found not in self._text else ()

    def _flag_columns(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Several columns that hold 0 and 1 alone, when no column beside them could be the label."""
        if self._label:
            return self._label if len(self._label) > 1 else ()
        rest = [name for name in self._rows.columns if name not in texts]
        flags = tuple(name for name in rest if _holds_flags(self._rows, name))
        return flags if len(flags) > 1 else ()

    def _tagged(self) -> tuple[str, str] | None:
        """(words, tags): two columns of lists."""
        words = self._text[0] if len(self._text) == 1 else self._found(_TOKEN_NAMES, ("list", "mixed"))
        tags = self._label[0] if len(self._label) == 1 else self._found(_TAG_NAMES, ("list", "mixed"))
        if words is None or tags is None or words == tags:
            return None
        both = [column_type(self._rows, name) for name in (words, tags)]
        return (words, tags) if all(kind in ("list", "mixed") for kind in both) and "list" in both else None

    def told(self) -> TaskSpec:
        """The task that columns, values and model make plain."""
        tagged = self._tagged()
        if tagged is not None:
            return self._tokens(tagged)
        fmt = chat.detect_format(self._rows.columns)
        if fmt is not None and not self._label and not self._text:
            return self._chat(fmt, f"columns {_quoted(self._chat_columns(fmt))} are the {fmt} format")
        labels = self._label_columns()
        texts = self._text_columns(labels)
        flags = () if labels and not len(labels) > 1 else self._flag_columns(texts)
        if texts and flags:
            reason = f"{len(flags)} columns hold 0 or 1: {_quoted(flags)}"
            return self._labelled("multilabel_classification", texts, flags, reason)
        if texts and not labels and len(self._rows.columns) == 2 and not self._model.is_decoder:
            labels = tuple(name for name in self._rows.columns if name not in texts)
        if texts and labels:
            kind, reason = told_by_values(self._rows, labels[0])
            return self._labelled(kind, texts, labels, reason)
        return self._unlabelled(texts)

    def _unlabelled(self, texts: tuple[str, ...]) -> TaskSpec:
        """Only text: a decoder learns to write it; an encoder has nothing to learn."""
        if not texts:
            raise self._unclear("none of them is known as text")
        if not self._model.is_decoder:
            raise self._unclear(f"there is text ('{texts[0]}') but no label, and an encoder learns from labels")
        if len(texts) == 2 and {_plain(name) for name in texts} == {"question", "answer"}:
            return self._chat("prompt_completion", "columns 'question' and 'answer', no label, and a model that writes")
        if len(texts) == 2:
            raise self._unclear(f"{_quoted(texts)} are a pair, but there is no label")
        reason = f"column {_quoted(texts)} is text, there is no label, and the model writes text"
        return TaskSpec("language_modelling", texts, reasons=(f"Task language modelling: {reason}.",))

    def _unclear(self, why: str) -> DataError:
        columns = _quoted(self._rows.columns[:12])
        return DataError(
            f"the task is not plain from the columns {columns}: {why}.",
            cure="Set data.text and data.label to column names (in CSV the first line names them), or task.kind.",
            location=self._rows.files[0],
        )

    def given(self, kind: TaskKind) -> TaskSpec:
        """The columns of the task that the job asks for."""
        if kind in LANGUAGE_KINDS and self._label:
            raise JobError(
                f"task.kind {kind} reads no label, but data.label is '{safe(self._label[0], limit=60)}'.",
                cure="Remove data.label, or set task.kind: classification.",
            )
        if kind == "token_classification":
            tagged = self._tagged()
            if tagged is None:
                raise self._lacking(kind, "two columns of lists, such as tokens and tags", "data.text and data.label")
            return self._tokens(tagged)
        if kind == "instruction":
            return self._instruction()
        if kind == "language_modelling":
            texts = self._text_columns(())
            if len(texts) != 1:
                raise self._lacking(kind, "one column of text", "data.text")
            return TaskSpec(kind, texts, reasons=(f"Task language modelling on column {_quoted(texts)}.",))
        labels = self._label_columns()
        if kind == "multilabel_classification" and not (labels and column_type(self._rows, labels[0]) == "list"):
            labels = self._flag_columns(self._text_columns(labels)) or labels
        texts = self._text_columns(labels)
        if not labels:
            raise self._lacking(kind, "a label column", "data.label")
        if not texts:
            raise self._lacking(kind, "a text column", "data.text")
        return self._labelled(kind, texts, labels, "set by task.kind")

    def _lacking(self, kind: str, what: str, key: str) -> DataError:
        return DataError(
            f"task.kind {kind} needs {what}; none is found among {_quoted(self._rows.columns[:12])}.",
            cure=f"Set {key} to column names, or change task.kind.",
            location=self._rows.files[0],
        )

    def _instruction(self) -> TaskSpec:
        reason = "set by task.kind"
        if len(self._text) == 2:
            return TaskSpec("instruction", self._text, chat_format="prompt_completion", reasons=(_said(reason),))
        if len(self._text) == 1:
            return TaskSpec("instruction", self._text, chat_format="messages", reasons=(_said(reason),))
        fmt = chat.detect_format(self._rows.columns)
        if fmt is None and {"question", "answer"} <= set(self._rows.columns):
            fmt = "prompt_completion"
        if fmt is None:
            what = "columns messages, conversations, instruction and output, or prompt and completion"
            raise self._lacking("instruction", what, "data.text")
        return self._chat(fmt, reason)

    def _chat_columns(self, fmt: str) -> tuple[str, ...]:
        """The columns that the format reads, of those that are there."""
        prompt = ("prompt", "completion") if "prompt" in self._rows.columns else ("question", "answer")
        read = {
            "messages": ("messages",),
            "sharegpt": ("conversations",),
            "alpaca": ("instruction", "input", "output", "history"),
            "prompt_completion": prompt,
        }
        return tuple(name for name in (*read[fmt], "system") if name in self._rows.columns)

    def _chat(self, fmt: str, reason: str) -> TaskSpec:
        return TaskSpec("instruction", self._chat_columns(fmt), chat_format=fmt, reasons=(_said(reason),))

    def _tokens(self, columns: tuple[str, str]) -> TaskSpec:
        reason = f"Task token classification: {_quoted(columns)} are lists of words and of their tags."
        return TaskSpec("token_classification", columns[:1], columns[1:], reasons=(reason,))

    def _labelled(self, kind: TaskKind, texts: tuple[str, ...], labels: tuple[str, ...], reason: str) -> TaskSpec:
        if kind != "multilabel_classification" and len(labels) > 1:
            raise JobError(
                f"task.kind {kind} has one label column, data.label names {len(labels)}.",
                cure="Name one, or set task.kind: multilabel_classification for columns of 0 and 1.",
            )
        shared = sorted(set(texts) & set(labels))
        if shared:
            raise JobError(
                f"column '{safe(shared[0], limit=60)}' cannot be text and label at once.", cure="Set data.label."
            )
        columns = f"text from {_quoted(texts)}, label from {_quoted(labels)}"
        return TaskSpec(kind, texts, labels, reasons=(f"Task {kind.replace('_', ' ')}: {columns}; {reason}.",))


def _said(reason: str) -> str:
    return f"Task instruction tuning: {reason}."


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{safe(name, limit=40)}'" for name in names)


def distinct(rows: Rows, column: str) -> list[Any]:
    """The different values of a column; for lists, of what is in them."""
    values = rows.stored.column(column)
    one = rows.stored.schema.field(column)
    if rowstore.is_json(one):
        return rowstore.decoded(one, values.unique())
    if pa.types.is_list(one.type):
        values = pa.chunked_array([chunk.flatten() for chunk in values.chunks], type=one.type.value_type)
    if pa.types.is_nested(values.type):
        return []
    return values.unique().to_pylist()


def _holds_flags(rows: Rows, column: str) -> bool:
    if column_type(rows, column) not in ("text", "number", "flag"):
        return False
    values = distinct(rows, column)
    try:
        return len(values) <= 5 and any(flag_of(value) is not None for value in values)
    except ValueError:
        return False


def told_by_values(rows: Rows, column: str) -> tuple[TaskKind, str]:
    """(kind, why) for a text task with one label column.

    Lists are several labels at once. Numbers with fractions, or more than 20 different whole numbers, are values to
    predict; whole numbers that run on from 0 in a column named like a class are ids of classes, up to 1000.
    """
    if column_type(rows, column) == "list":
        return "multilabel_classification", "its values are lists"
    if rows.class_names.get(column):
        return "classification", f"the file names {len(rows.class_names[column])} classes"
    values = distinct(rows, column)
    if any(isinstance(value, (list, dict)) for value in values):
        return "classification", "set by its name"
    names = {name for value in values if (name := label_name(value)) is not None}
    if not names or not all(is_number(name) for name in names):
        return "classification", f"{len(names):,} different labels"
    numbers = sorted({float(name) for name in names})
    whole = all(number.is_integer() for number in numbers)
    many = f"{len(numbers):,} different numbers"
    if not whole:
        return "regression", f"{many}, some with fractions"
    run_on = numbers[0] in (0, 1) and numbers[-1] - numbers[0] == len(numbers) - 1
    if len(numbers) <= FEW_NUMBERS or (run_on and len(numbers) <= 1000 and _plain(column) in _CLASS_LIKE):
        return "classification", f"only {many}, all whole"
    return "regression", many
