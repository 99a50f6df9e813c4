"""Trimtab fine-tunes big models on small cards.

`trimtab.train(job)` trains, `trimtab.load(run).predict(texts)` applies what was trained, `trimtab.Trainer` does the
same for a module, data and loss of your own. Importing this package loads no torch; the first use of a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab.api import Trainer, load, train
    from trimtab.job import Job
    from trimtab.runs import Run

__all__ = ["Job", "Run", "Trainer", "__version__", "load", "train"]

_HOMES = {
    "Job": "trimtab.job",
    "Run": "trimtab.runs",
    "Trainer": "trimtab.api",
    "load": "trimtab.api",
    "train": "trimtab.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab' has no attribute '{name}'; it has {', '.join(__all__)}")
    return vars(import_module(_HOMES[name]))[name]


def __dir__() -> list[str]:
    return __all__
