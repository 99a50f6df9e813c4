"""Chat templates are code from strangers: Jinja with a sandbox, a budget of loop turns and a limit on every text.

Jinja's own sandbox blocks attributes that lead out of it, but neither `{{ 'a' * 8000000000 }}` nor nested loops. Here
each loop body is counted, and each operation that can make a long text is checked before it runs.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any, cast

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

LOOP_TURNS = 100_000
"""Most loop turns in one rendering; a conversation of 1,000 messages in the longest template seen takes 20,000."""
RANGE_SIZE = 10_000
TEXT_CHARS = 1_000_000
"""Longest text in a template besides its input; the input may be as long again eight times."""
TEMPLATE_CHARS = 200_000

GENERATION_START, GENERATION_END = "\ue0f0", "\ue0f1"
"""Marks around what `{% generation %}` encloses (private use characters; taken out of the input beforehand)."""

_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_REFUSED_METHODS = frozenset({"format", "format_map", "translate", "encode", "maketrans"})
_REFUSED_FILTERS = (
    "center",
    "format",
    "pprint",
    "random",
    "urlize",
    "wordwrap",
    "xmlattr",
    "filesizeformat",
    "forceescape",
)
_TRAINING_DATE = datetime.datetime(2024, 7, 26)
"""What `strftime_now` tells a template, so that a job gives the same tokens on every day."""


class BadTemplateError(Exception):
    """A template that cannot be read or rendered; the message is a plain reason."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the model is to produce, between two marks."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _marked(self, context: EvalContext, caller: Macro) -> str:
        return f"{GENERATION_START}{caller()}{GENERATION_END}"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with budgets. One rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "<<"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.turns_left = 0
        self.most_chars = 0
        for name in _REFUSED_FILTERS:
            self.filters.pop(name, None)
        checked: dict[str, Callable[..., Any]] = {
            "tojson": _to_json,
            "replace": self._checked_replace,
            "join": self._checked_join,
            "indent": self._checked_indent,
        }
        self.filters.update(cast("Any", checked))
        own = {"range": _small_range, "raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals.update(cast("Any", own))
        self.globals.pop("lipsum", None)

    def start(self, input_chars: int) -> None:
        """Fills the budgets before a rendering of an input of so many characters."""
        self.turns_left = LOOP_TURNS
        self.most_chars = TEXT_CHARS + 8 * input_chars

    def tick(self) -> str:
        """Counts one turn of a loop or one call of a macro."""
        self.turns_left -= 1
        if self.turns_left < 0:
            raise BadTemplateError(f"it takes more than {LOOP_TURNS:,} loop turns")
        return ""

    def check_chars(self, count: int) -> None:
        """Refuses a text or list of that size before it exists."""
        if count > self.most_chars:
            raise BadTemplateError(f"it makes a text of {count:,} characters (limit {self.most_chars:,})")

    def concat_checked(self, *parts: Any) -> str:
        """What `a ~ b` does, within the limit."""
        texts = [str(part) for part in parts]
        self.check_chars(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise BadTemplateError("formatting with % is not allowed in a chat template")
        if operator in ("**", "<<"):
            raise BadTemplateError(f"the operator {operator} is not allowed in a chat template")
        if operator == "*":
            self.check_chars(max(_size(left) * _count(right), _size(right) * _count(left)))
        if operator == "+":
            self.check_chars(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            __self._check_method(owner, name, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        # Jinja asks this for every attribute that is read; its own wrapper of str.format leaves the width unlimited.
        if (
            isinstance(value, BuiltinMethodType)
            and isinstance(value.__self__, str)
            and value.__name__ in _REFUSED_METHODS
        ):
            raise BadTemplateError(f"the text method {value.__name__} is not allowed in a chat template")
        return super().wrap_str_format(value)

    def _check_method(self, text: str, name: str, args: tuple[Any, ...]) -> None:
        if name in _WIDTH_METHODS:
            width = max((abs(arg) for arg in args if isinstance(arg, int)), default=8)
            self.check_chars(len(text) * width if name == "expandtabs" else width)
        if name == "replace" and len(args) > 1:
            self._check_replaced(text, args[0], args[1])
        if name == "join" and args:
            self._check_joined(args[0], text)

    def _check_replaced(self, text: str, old: Any, new: Any) -> None:
        old, new = str(old), str(new)
        times = text.count(old) if old else len(text) + 1
        self.check_chars(len(text) + times * max(len(new) - len(old), 0))

    def _check_joined(self, parts: Any, separator: str) -> None:
        if isinstance(parts, (str, list, tuple)):
            self.check_chars(sum(_size(part) for part in parts) + len(parts) * len(separator))

    def _checked_replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        self._check_replaced(str(text), old, new)
        return str(text).replace(old, new) if count is None else str(text).replace(old, new, count)

    def _checked_join(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        items: list[Any] = list(value)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        texts = [str(item) for item in items]
        self._check_joined(texts, d)
        return d.join(texts)

    def _checked_indent(self, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        size = len(width) if isinstance(width, str) else width
        self.check_chars(len(s) + size * (s.count("\n") + 1))
        return do_indent(s, width, first, blank)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _count(value: Any) -> int:
    """How often a list or text is repeated by this factor; a number too large for any use is refused."""
    if not isinstance(value, int):
        return 0
    if value.bit_length() > 256:
        raise BadTemplateError("it computes with a number of over 256 bits")
    return value


def _small_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > RANGE_SIZE:
        raise BadTemplateError(f"it asks for a range of {len(numbers):,} numbers (limit {RANGE_SIZE:,})")
    return numbers


def _raise_exception(message: str) -> None:
    raise BadTemplateError(f"it refuses this conversation: {message}")


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100:
        raise BadTemplateError("it asks for a date pattern of over 100 characters")
    return _TRAINING_DATE.strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as chat templates expect it from transformers."""
    if indent is not None and indent > 16:
        raise BadTemplateError("it indents JSON by more than 16 blanks")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class SafeTemplate:
    """A compiled chat template. Raises BadTemplateError, here and in `render`."""

    def __init__(self, source: str) -> None:
        if len(source) > TEMPLATE_CHARS:
            raise BadTemplateError(f"it has {len(source):,} characters (limit {TEMPLATE_CHARS:,})")
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self.has_generation = any(
                isinstance(block.call.node, nodes.ExtensionAttribute) for block in tree.find_all(nodes.CallBlock)
            )
            _count_turns(tree)
            code = self._environment.compile(tree, name="chat template")
        except (TemplateError, RecursionError, SyntaxError, OverflowError, MemoryError) as error:
            raise BadTemplateError(f"it is no valid Jinja: {error}") from error
        self._template = Template.from_code(self._environment, code, self._environment.globals)

    def render(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        """The text of the conversation, with marks where the template has `{% generation %}`."""
        limits = self._environment
        limits.start(sum(len(message["content"]) for message in messages))
        try:
            blocks = self._template.generate(
                {**variables, "messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
            )
            return "".join(_limited(blocks, limits))
        except BadTemplateError:
            raise
        except RecursionError as error:
            raise BadTemplateError("it calls itself without an end") from error
        # A template can raise what any Python expression can; all of it is the template's fault.
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            MemoryError,
        ) as error:
            raise BadTemplateError(f"it fails: {type(error).__name__}: {error}") from error


def _limited(blocks: Iterator[str], limits: _Environment) -> Iterator[str]:
    total = 0
    for block in blocks:
        total += len(block)
        limits.check_chars(total)
        yield block


def _count_turns(tree: nodes.Template) -> None:
    """Puts a tick at the start of each loop and macro body, and checks in place of each `~`."""
    for kind in (nodes.For, nodes.Macro):
        for block in list(tree.find_all(kind)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            block.body.insert(0, nodes.Output([tick]).set_lineno(block.lineno))
    _replace_concat(tree)


def _replace_concat(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_checked(item) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _checked(value))


def _checked(node: Any) -> Any:
    """The node, or a call that concatenates within the limit if it is a `~`."""
    if not isinstance(node, nodes.Node):
        return node
    _replace_concat(node)
    if not isinstance(node, nodes.Concat):
        return node
    call = nodes.Call(nodes.EnvironmentAttribute("concat_checked"), list(node.nodes), [], None, None)
    return call.set_lineno(node.lineno)
