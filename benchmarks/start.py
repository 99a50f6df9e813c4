"""Time to the end of the first step, transformers.Trainer against `trimtab train`, and the time of `trimtab --help`.

`python benchmarks/start.py [--rounds 5] [--rows 2000]`. Fresh processes, in turn; every round has its own data file, so
that no cache of tokens helps. Both read the CSV file, tokenise all of it, load MiniLM and train on batches of 16.
Results go to `benchmarks/results/start-<date>.json`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "peers"))

import environments  # noqa: E402
import machine  # noqa: E402
import sources  # noqa: E402
import workloads  # noqa: E402

FIRST_STEP_GOAL, HELP_GOAL_SECONDS = 0.6, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / f"start-{datetime.date.today()}.json")
    given = parser.parse_args()
    texts = sources.docstrings(max(given.rows, 8), workloads.SEED)[: given.rows]
    runs = [measure_round(number, texts) for number in range(1, given.rounds + 1)]
    document = {
        "date": datetime.date.today().isoformat(),
        "machine": machine.facts(),
        "rows": len(texts),
        "runs": runs,
        "summary": summarise(runs),
    }
    given.output.parent.mkdir(exist_ok=True)
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["summary"], indent=1))
    print(given.output)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians in seconds, and the ratio of neighbours against the goals."""
    names = ("trainer", "trainer_bf16", "trimtab", "help", "python")
    ratios = [run["trimtab"] / min(run["trainer"], run["trainer_bf16"]) for run in runs]
    return {
        "median_seconds": {name: median(run[name] for run in runs) for name in names},
        "first_step_ratio": median(ratios),
        "first_step_goal": FIRST_STEP_GOAL,
        "first_step_met": median(ratios) <= FIRST_STEP_GOAL,
        "help_goal_seconds": HELP_GOAL_SECONDS,
        "help_met": median(run["help"] for run in runs) < HELP_GOAL_SECONDS,
    }


def measure_round(number: int, texts: list[dict[str, str]]) -> dict[str, Any]:
    """Seconds of each contestant in one round."""
    with tempfile.TemporaryDirectory(prefix="start-") as made:
        folder = Path(made)
        data = _write_csv(folder / "data.csv", texts, number)
        model = workloads.minilm(folder)
        run: dict[str, Any] = {"round": number, "load_average": machine.load_average()}
        run["trainer"] = _trainer(folder / "fp32", data, model, [])
        run["trimtab"] = _trimtab(folder / "run", data, model)
        run["trainer_bf16"] = _trainer(folder / "bf16", data, model, ["--bf16"])
        run["help"] = _seconds([sys.executable, "-m", "trimtab", "--help"])
        run["python"] = _seconds([sys.executable, "-c", "pass"])
    print(json.dumps(run), flush=True)
    return run


def _write_csv(path: Path, texts: list[dict[str, str]], number: int) -> Path:
    """The same texts in another order each round."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["text", "label"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(random.Random(number).sample(texts, len(texts)))
    return path


def _trainer(scratch: Path, data: Path, model: str, more: list[str]) -> float:
    result = scratch.with_suffix(".json")
    script = ROOT / "peers" / "contenders" / "first_step.py"
    begin = time.time()
    command = [environments.python_of("hf"), script, data, model, scratch, result]
    _run([*map(str, command), *more])
    return json.loads(result.read_text(encoding="utf-8"))["first_step_at"] - begin


def _trimtab(run: Path, data: Path, model: str) -> float:
    settings = {
        "data.text": "text",
        "data.label": "label",
        "data.eval_fraction": "0",
        "training.batch_size": "16",
        "training.max_length": "256",
        "training.max_steps": "2",
        "output.run": json.dumps(str(run)),
    }
    chosen = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    begin = time.time()
    command = ["-m", "trimtab", "train", "--model", model, "--data", str(data), "--task", "classification"]
    _run([sys.executable, *command, *chosen, "--json"])
    with (run / "events.jsonl").open(encoding="utf-8") as stream:
        events = [json.loads(line) for line in stream]
    return next(event["time"] for event in events if event["kind"] == "step") - begin


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    _run(command)
    return time.perf_counter() - begin


def _run(command: list[str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
