"""Tests that need a CUDA card. Without one they are skipped with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

GPU_BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder, and skips it where no card is there."""
    here = Path(__file__).resolve().parent
    reason = f"torch {torch.__version__} sees no CUDA card"
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory):
    """`made(kind)`: a tiny model with a tokenizer and rows, made on the spot."""
    sys.path.insert(0, str(GPU_BENCHMARKS))
    import making

    folder = tmp_path_factory.mktemp("gpu")
    return lambda kind: making.make(kind, folder, making.QUICK)


@pytest.fixture(autouse=True)
def whole_card():
    """Gives back the card's memory, and the share of it that a test may have taken away."""
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
