"""Runs the five example jobs on real data and keeps their metrics, before and after, beside the facts of the machine.

`python examples/fetch.py` first; then `python benchmarks/examples.py [--jobs vader,trec]`. Each job runs as a user runs
it: `trimtab train JOB --eval-first --json`. Results go to `benchmarks/results/examples-<date>.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
EXAMPLES = ROOT.parent / "examples"
sys.path.insert(0, str(ROOT / "peers"))

import machine  # noqa: E402

JOBS = ("vader", "usaddress", "snownlp", "trec", "alpaca")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="Names, with commas.")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / f"examples-{datetime.date.today()}.json")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
    results: dict[str, Any] = kept.get("jobs", {})
    for name in given.jobs.split(","):
        results[name] = run(name)
        shown = {key: round(value, 4) for key, value in results[name]["metrics"].items()}
        print(name, shown, f"{results[name]['train_seconds']:.0f} s", flush=True)
        document = {"machine": machine.facts(), "load": machine.load_average(), "jobs": results}
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run(name: str) -> dict[str, Any]:
    """What `trimtab train` reports of one example, without the paths of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trimtab", "train", str(EXAMPLES / f"{name}.yaml"), "--eval-first", "--json"]
        done = subprocess.run(
            [*command, "--output", f"{folder}/run"], stdout=subprocess.PIPE, check=True, encoding="utf-8"
        )
    document = json.loads(done.stdout)
    return {key: document[key] for key in ("metrics_before", "metrics", "train_seconds")}


if __name__ == "__main__":
    main()
