"""Runs cases one after another within a time budget, and keeps the results. Shared by the scripts of this folder."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import making  # noqa: E402
from worker import Case, run_case  # noqa: E402

BUDGET_SECONDS = 480.0
"""No case is begun after this, so that a script ends within a call of 10 minutes."""
LONGEST_CASE_SECONDS = 240.0


@dataclass(frozen=True)
class Setup:
    """What the command line of every script says."""

    device: str
    quick: bool
    kinds: tuple[str, ...]
    precisions: tuple[str, ...]
    output: Path
    work: Path

    @property
    def sizes(self) -> making.Sizes:
        return making.QUICK if self.quick else making.FULL

    def case(self, engine: str, kind: str, precision: str, **changes: Any) -> Case:
        """A case of this set-up, on the model and rows made for `kind`."""
        made = making.make(kind, self.work, self.sizes)
        standard: dict[str, Any] = {
            "name": f"{kind} {engine} {precision}",
            "engine": engine,
            "kind": kind,
            "model": made.model,
            "rows": made.rows,
            "device": self.device,
            "precision": precision,
            "batch_size": 8 if self.quick else 32,
            "max_length": 64 if self.quick else 512,
            "steps": 4 if self.quick else 24,
            "warmup": 1 if self.quick else 4,
        }
        return Case(**{**standard, **changes})


def read_setup(title: str, script: str, precisions: Sequence[str]) -> Setup:
    """Reads the command line. Ends with a reason where the device asked for is not there."""
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a smoke run of the logic")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps")
    parser.add_argument("--kinds", default=",".join(making.KINDS))
    parser.add_argument("--precisions", default=",".join(precisions))
    parser.add_argument(
        "--output", type=Path, help="result file; left out: benchmarks/results/gpu-<script>-<date>.json"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "trimtab-gpu-benchmark")
    given = parser.parse_args()
    if given.device == "cuda":
        _need_card()
    standard = HERE.parent / "results" / f"gpu-{script}-{datetime.date.today().isoformat()}.json"
    return Setup(
        device=given.device,
        quick=given.quick,
        kinds=tuple(given.kinds.split(",")),
        precisions=tuple(given.precisions.split(",")),
        output=given.output or standard,
        work=given.work / ("quick" if given.quick else "full"),
    )


def _need_card() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA card. For a smoke run: --device cpu --quick")


def run_all(setup: Setup, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Runs the cases in order and writes the results after each. On a card each has a process of its own."""
    begin = time.monotonic()
    results: list[dict[str, Any]] = []
    for case in cases:
        if time.monotonic() - begin > BUDGET_SECONDS:
            results.append({**asdict(case), "error": f"not begun: the budget of {BUDGET_SECONDS:g} s was spent"})
        else:
            results.append(run_case(case) if setup.device == "cpu" else _apart(case))
        say(results[-1])
        write(setup, results)
    return results


def _apart(case: Case) -> dict[str, Any]:
    """The case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        told, result = Path(folder) / "case.json", Path(folder) / "result.json"
        told.write_text(json.dumps(asdict(case)), encoding="utf-8")
        command = [sys.executable, str(HERE / "worker.py"), str(told), str(result)]
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", timeout=LONGEST_CASE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {**asdict(case), "error": f"stopped after {LONGEST_CASE_SECONDS:g} s"}
        if result.is_file():
            return json.loads(result.read_text(encoding="utf-8"))
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {**asdict(case), "error": "; ".join(lines[-2:])[-600:] or f"exit code {done.returncode}"}


def say(result: dict[str, Any]) -> None:
    """One line for people."""
    if "error" in result:
        print(f"{result['name']:44} {result['error']}", flush=True)
        return
    peak = result.get("peak_allocated_bytes", result["peak_rss_bytes"]) / 1024**3
    print(
        f"{result['name']:44} {result['tokens_per_second']:10.0f} tok/s  {peak:6.2f} GiB peak"
        f"  loss {result['mean_loss']:.4f}",
        flush=True,
    )


def write(setup: Setup, results: list[dict[str, Any]]) -> None:
    """The result file, with the facts of the device."""
    setup.output.parent.mkdir(parents=True, exist_ok=True)
    document = {"date": datetime.date.today().isoformat(), "device": device_facts(setup.device), "results": results}
    setup.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def device_facts(device: str) -> dict[str, Any]:
    """Name, capability and memory of the card, and versions."""
    import torch
    import transformers

    facts: dict[str, Any] = {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        facts |= {
            "name": card.name,
            "capability": [card.major, card.minor],
            "total_bytes": card.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts
