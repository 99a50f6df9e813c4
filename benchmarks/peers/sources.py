"""Texts for the workloads, read from the source files of installed packages: no download, real English and code."""

from __future__ import annotations

import ast
import importlib.util
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("stdlib", "torch", "transformers", "numpy")
_SKIPPED = frozenset({"site-packages", "test", "tests", "testing", "idlelib", "__pycache__", "lib2to3"})
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_LEAST_CHARACTERS = 20
_MOST_FILES = 700
"""Of each library, taken evenly over its sorted files: enough texts, and seconds of parsing instead of minutes."""


def folder_of(library: str) -> Path:
    """Where a library's sources lie; its code is not run."""
    if library == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{library} is not installed here: run this with the project's own interpreter.")
    return Path(spec.submodule_search_locations[0])


def documented(library: str) -> Iterator[tuple[str, Documented]]:
    """Docstring and node of every documented function and class, in the order of the sorted files."""
    root = folder_of(library)
    files = sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    step = max(1, len(files) // _MOST_FILES)
    for path in files[::step]:
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, Documented):
                text = ast.get_docstring(node)
                if text and len(text) >= _LEAST_CHARACTERS and "\x00" not in text:
                    yield text, node


def docstrings(limit: int, seed: int) -> list[dict[str, str]]:
    """At most `limit` different docstrings with the library they come from, evenly over the libraries, shuffled."""
    chosen: list[dict[str, str]] = []
    seen: set[str] = set()
    for library in LIBRARIES:
        fresh = [text for text, _ in documented(library) if not (text in seen or seen.add(text))]
        random.Random(f"{seed} {library}").shuffle(fresh)
        chosen += [{"text": text, "label": library} for text in fresh[: limit // len(LIBRARIES)]]
    random.Random(seed).shuffle(chosen)
    return chosen


def function_pairs(seed: int) -> list[dict[str, str]]:
    """`Document this function` -> its docstring, for the functions of all libraries, shuffled."""
    pairs: dict[str, dict[str, str]] = {}
    for library in LIBRARIES:
        for text, node in documented(library):
            if isinstance(node, ast.ClassDef) or len(node.body) < 2:
                continue
            pairs.setdefault(text, {"prompt": prompt_for(node), "completion": text})
    shuffled = list(pairs.values())
    random.Random(seed).shuffle(shuffled)
    return shuffled


def prompt_for(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The question, with the function as it stands but for its docstring."""
    node.body = node.body[1:]
    return f"Document this function.\n\n{ast.unparse(node)}\n\nDocumentation:"
