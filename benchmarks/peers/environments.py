"""Virtual environments for the peers, made once below `benchmarks/.venvs`.

torch is pinned, so that a CPU build at hand is taken and no peer trades it for a CUDA build of several GB. What a peer
asks for beside it and would drag such a build in (torchvision, torchaudio) is left out; no text benchmark needs them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio"})


@dataclass(frozen=True)
class Environment:
    """Packages that go together."""

    name: str
    requirements: tuple[str, ...]


HF = Environment(
    "hf",
    (
        "transformers==5.24.0",
        "accelerate==1.15.0",
        "lightning==2.6.6",
        "trl==1.16.0",
        "datasets==5.2.0",
    ),
)
LITGPT = Environment("litgpt", ("litgpt==0.5.13", "requests"))
"""`requests` is what its command line needs and does not ask for."""
LLAMAFACTORY = Environment("llamafactory", ("llamafactory==0.9.5",))
ENVIRONMENTS = {environment.name: environment for environment in (HF, LITGPT, LLAMAFACTORY)}


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment, or this one for `trimtab`; makes the environment where it is missing."""
    if name == "trimtab":
        return Path(sys.executable)
    folder = ROOT / ".venvs" / name
    environment = ENVIRONMENTS[name]
    marker = folder / "installed.json"
    wanted = [TORCH, *environment.requirements]
    if not marker.is_file() or json.loads(marker.read_text(encoding="utf-8")) != wanted:
        print(f"making the environment of {name} in {folder}", flush=True)
        _install(folder, environment)
        marker.write_text(json.dumps(wanted), encoding="utf-8")
    return _interpreter(folder)


def _interpreter(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _install(folder: Path, environment: Environment) -> None:
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(_interpreter(folder)), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, TORCH], check=True)
    with tempfile.TemporaryDirectory() as made:
        constraints, report = Path(made) / "constraints.txt", Path(made) / "report.json"
        constraints.write_text(TORCH + "\n", encoding="utf-8")
        resolve = ["--dry-run", "--report", str(report), "-c", str(constraints), *environment.requirements]
        subprocess.run([*pip, *resolve], check=True)
        chosen = _chosen(report)
    subprocess.run([*pip, "--no-deps", *chosen], check=True)


def _chosen(report: Path) -> list[str]:
    """`name==version` of all that pip would install, without what is left out."""
    packages = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    kept = [package for package in packages if package["name"].lower() not in LEFT_OUT]
    return [f"{package['name']}=={package['version']}" for package in kept]


def versions_of(name: str) -> dict[str, str]:
    """Installed versions of the packages that a result depends on."""
    code = (
        "import json, importlib.metadata as m; names = ['torch', 'transformers', 'accelerate', 'lightning', 'trl',"
        " 'litgpt', 'llamafactory', 'peft', 'tokenizers', 'trimtab'];"
        "print(json.dumps({n: m.version(n) for n in names if next(m.Distribution.discover(name=n), None)}))"
    )
    done = subprocess.run([str(python_of(name)), "-c", code], check=True, capture_output=True, encoding="utf-8")
    return json.loads(done.stdout)


if __name__ == "__main__":
    for wanted_name in sys.argv[1:] or list(ENVIRONMENTS):
        python_of(wanted_name)
        print(json.dumps({wanted_name: versions_of(wanted_name)}))
