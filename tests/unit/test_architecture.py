"""Rules on the source itself: layers, what imports what, nothing that runs code from data, and a whole wheel."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import trimtab

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "trimtab"
MODULES = sorted(SOURCE.rglob("*.py"))

# Modules that must load without torch, so that help, checks and most tests stay quick (docs/decisions/001).
LIGHT = (
    "errors units text job jobfile jobyaml jobproblems events files runs train.signals"
    " data.task data.formats data.examples data.chat data.tokenize data.groups data.report"
    " cli cli.app cli.output cli.options cli.rows cli.progress cli.summary cli.starter cli.conversation"
    " cli.train_commands cli.use_commands cli.data_commands cli.demo_commands cli.run_commands"
    " demo.packages demo.result"
)
LIGHT_PACKAGES = ("", "data", "cli", "demo", "models", "train", "kernels", "export", "hardware", "parallel", "planning")


def names_of(text: str) -> list[str]:
    return [name for name in text.split() if (SOURCE / f"{name.replace('.', '/')}.py").exists()]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports at any place, but for those that only a type checker sees."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def importers(package: str) -> set[str]:
    """Modules of ours that import `package`, by their path below src/trimtab."""
    return {
        path.relative_to(SOURCE).as_posix()
        for path in MODULES
        if any(name.split(".")[0] == package for name, _ in imports_of(path))
    }


def test_layers_hold() -> None:
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_transformers_is_imported_at_its_border_only() -> None:
    border = {name for name in importers("transformers") if not name.startswith("models/")}
    assert not border, "transformers is imported by modules outside models/"


def test_peft_is_imported_by_one_module() -> None:
    assert importers("peft") <= {"models/adapters.py"}


def test_datasets_and_accelerate_are_not_needed_at_import() -> None:
    assert not importers("accelerate")
    assert importers("datasets") <= {"data/formats.py", "data/sourcefiles.py"}


@pytest.mark.parametrize("package", ["pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"])
def test_nothing_reads_formats_that_can_run_code(package: str) -> None:
    assert not importers(package)


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_call_runs_code_or_a_shell() -> None:
    forbidden = {
        "eval",
        "exec",
        "compile",
        "__import__",
        "torch.load",
        "os.system",
        "os.popen",
        "yaml.load",
        "yaml.unsafe_load",
    }
    for path in MODULES:
        for name, call in calls_of(path):
            assert name not in forbidden, f"{path}:{call.lineno} calls {name}"
            shell = [word for word in call.keywords if word.arg == "shell"]
            assert not shell, f"{path}:{call.lineno} passes shell="


def test_text_files_are_opened_with_an_encoding() -> None:
    """Python 3.10 to 3.14 on Windows take the code page otherwise."""
    for path in MODULES:
        for name, call in calls_of(path):
            if name.rsplit(".", 1)[-1] in ("read_text", "write_text"):
                given = {word.arg for word in call.keywords}
                assert "encoding" in given, f"{path}:{call.lineno} has no encoding"


def test_no_bare_except_and_no_module_for_odds_and_ends() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}:{node.lineno}"
        assert path.stem not in ("utils", "helpers", "misc", "common"), path


def test_modules_inside_the_package_do_not_import_its_root() -> None:
    allowed = {"__version__"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "trimtab":
                taken = {alias.name for alias in node.names}
                modules = {name for name in taken if (SOURCE / f"{name}.py").exists() or (SOURCE / name).is_dir()}
                assert taken - modules <= allowed, f"{path}:{node.lineno} imports {taken - modules} from the root"


def test_light_modules_load_no_torch() -> None:
    names = [*names_of(LIGHT), *(name for name in LIGHT_PACKAGES if (SOURCE / name / "__init__.py").exists())]
    modules = [f"trimtab.{name}".rstrip(".") for name in names]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'peft'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------------------------------- the package


def test_importing_the_package_loads_nothing_but_itself() -> None:
    code = "import sys, trimtab; print(*[n for n in ('torch', 'numpy', 'pydantic', 'typer') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == ""
    assert done.returncode == 0


def test_exported_names() -> None:
    assert trimtab.__all__ == ["Job", "Run", "Trainer", "__version__", "load", "train"]
    assert dir(trimtab) == trimtab.__all__
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        importlib.import_module("trimtab").__getattr__("trian")


@pytest.mark.parametrize("name", trimtab.__all__)
def test_every_exported_name_exists(name: str) -> None:
    assert vars(trimtab).get(name) is not None or getattr(trimtab, name) is not None


def test_the_version_of_the_package_is_that_of_the_project_file() -> None:
    assert f'version = "{trimtab.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    built = Path(next(wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])))
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode("utf-8")
    wanted = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyo")
    }
    assert wanted <= names
    assert {"trimtab/py.typed", "trimtab/demo/identity.jsonl"} <= names
    assert not any(name.split("/")[0] in ("tests", "benchmarks", "examples", "docs") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("entry_points.txt") for name in names)
