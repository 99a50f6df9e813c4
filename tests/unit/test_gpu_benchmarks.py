"""The scripts for a lent card run their logic here, on the CPU, with models made on the spot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


def run(script: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), "--work", str(tmp_path / "work"), *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)


def test_every_precision_of_a_cpu_agrees_with_fp32(tmp_path: Path) -> None:
    output = tmp_path / "precisions.json"
    done = run("precisions.py", tmp_path, "--device", "cpu", "--quick", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert {(one["kind"], one["precision"]) for one in results} == {
        (kind, precision)
        for kind in ("classification", "instruction")
        for precision in ("fp32", "bf16", "bf16_weights")
    }
    assert all(one["tokens_per_second"] > 0 and one["peak_rss_bytes"] > 0 for one in results)
    assert all("loss_distance_share" in one for one in results if one["precision"] != "fp32")


def test_trainer_and_trimtab_count_the_same_tokens_for_the_same_rows(tmp_path: Path) -> None:
    output = tmp_path / "against.json"
    arguments = ("--device", "cpu", "--quick", "--kinds", "classification", "--output", str(output))
    done = run("against_trainer.py", tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    trainer, trimtab = json.loads(output.read_text(encoding="utf-8"))["results"]
    assert (trainer["engine"], trimtab["engine"]) == ("trainer", "trimtab")
    assert trimtab["against_trainer"]["speed"] > 0
    # Other orders, so other rows in the three timed steps; both pass over rows of the same lengths.
    assert 0.5 < trainer["tokens"] / trimtab["tokens"] < 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is there")
@pytest.mark.parametrize("script", ["precisions.py", "small_card.py", "against_trainer.py"])
def test_without_a_card_a_script_says_so(tmp_path: Path, script: str) -> None:
    done = run(script, tmp_path)
    assert done.returncode == 1
    assert "sees no CUDA card" in done.stderr
    assert "--device cpu --quick" in done.stderr
