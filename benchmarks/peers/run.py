"""Compares Trimtab with its peers in one interleaved run: `python benchmarks/peers/run.py [--quick]`.

Every contestant is a fresh process with the same model, rows, batch size, number of steps, seed and longest length, on
the same pinned cores. Results go to `benchmarks/results/peers-<date>.json` and `.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import environments
import machine
import report
import workloads
from contestants import CONTESTANTS, Contestant

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CACHE = ROOT / ".cache"
DEFAULT_TASKS = ("cls", "sft", "bertbase")
LONGEST_RUN_SECONDS = 1200


def main() -> None:
    given = _read_arguments()
    cores = list(range(os.cpu_count() or 1))[-given.threads :]
    pinned = machine.pin(cores)
    chosen = [CONTESTANTS[name] for name in given.peers]
    pythons = {one.environment: environments.python_of(one.environment) for one in chosen}
    CACHE.mkdir(exist_ok=True)
    folders = {name: workloads.prepare(workloads.WORKLOADS[name], CACHE, quick=given.quick) for name in given.tasks}
    document: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "settings": {
            "threads": given.threads,
            "cores": cores if pinned else None,
            "rounds": given.rounds,
            "quick": given.quick,
        },
        "machine": machine.facts(),
        "versions": {name: environments.versions_of(name) for name in sorted(pythons)},
        "workloads": {
            name: json.loads((folder / "task.json").read_text(encoding="utf-8")) for name, folder in folders.items()
        },
        "runs": [],
    }
    target = _target(given)
    for number in range(1, given.rounds + 1):
        for task, folder in folders.items():
            for one in chosen:
                if document["workloads"][task]["kind"] in one.kinds:
                    document["runs"].append(measure(one, task, folder, number, given.threads, pythons))
                    _write(document, target)
    print(f"\n{target.with_suffix('.md')}\n")
    print(target.with_suffix(".md").read_text(encoding="utf-8"))


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and one round")
    parser.add_argument("--tasks", default=",".join(DEFAULT_TASKS), help=f"of {', '.join(workloads.WORKLOADS)}")
    parser.add_argument("--peers", default=",".join(CONTESTANTS), help="names, or beginnings of names, by commas")
    parser.add_argument("--rounds", type=int, help="left out: 3, or 1 with --quick")
    parser.add_argument("--threads", type=int, default=1, help="cores to pin to, and threads for each contestant")
    parser.add_argument("--output", type=Path, help="result file; left out: benchmarks/results/peers-<date>.json")
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    given.tasks = given.tasks.split(",")
    unknown = [name for name in given.tasks if name not in workloads.WORKLOADS]
    wanted = given.peers.split(",")
    given.peers = [name for name in CONTESTANTS if name.startswith(tuple(wanted))]
    unknown += [name for name in wanted if not any(known.startswith(name) for known in CONTESTANTS)]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}. Tasks: {', '.join(workloads.WORKLOADS)}."
                     f" Peers: {', '.join(CONTESTANTS)}.")  # fmt: skip
    if not 1 <= given.threads <= (os.cpu_count() or 1):
        parser.error(f"--threads {given.threads}: this machine has {os.cpu_count()} cores.")
    return given


def _target(given: argparse.Namespace) -> Path:
    """The result file; one of the same day is never written over."""
    if given.output is not None:
        return given.output
    folder = ROOT / "results"
    folder.mkdir(exist_ok=True)
    stem = f"peers-{datetime.date.today().isoformat()}" + ("-quick" if given.quick else "")
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(folder / f"{name}.json" for name in names if not (folder / f"{name}.json").exists())


def measure(
    one: Contestant, task: str, folder: Path, number: int, threads: int, pythons: dict[str, Path]
) -> dict[str, Any]:
    """Runs one contestant between two probes; a failure is recorded with its last line, never hidden."""
    run: dict[str, Any] = {
        "workload": task,
        "kind": json.loads((folder / "task.json").read_text(encoding="utf-8"))["kind"],
        "contestant": one.name,
        "role": one.role,
        "round": number,
        "load_average": machine.load_average(),
        "probe_before": machine.probe(threads),
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="peers-") as scratch:
        result = Path(scratch) / "result.json"
        run |= _start(one, folder, result, threads, pythons[one.environment])
        if result.is_file():
            run["measured"] = _with_rates(json.loads(result.read_text(encoding="utf-8")))
            run.pop("error", None)
    run["total_seconds"] = time.monotonic() - start
    run["probe_after"] = machine.probe(threads)
    _say(run)
    return run


def _start(one: Contestant, folder: Path, result: Path, threads: int, python: Path) -> dict[str, Any]:
    scratch = result.parent / "scratch"
    scratch.mkdir()
    command = [
        str(python), str(HERE / "contenders" / one.script), str(folder),
        "--scratch", str(scratch), "--result", str(result), *one.arguments(),
    ]  # fmt: skip
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(scratch / "hub"),
        "PYTHONIOENCODING": "utf-8",
        "CUDA_VISIBLE_DEVICES": "",
    }
    log = result.parent / "log.txt"
    with log.open("w", encoding="utf-8") as stream:
        environment = {**os.environ, **settings, "BENCHMARK_STARTED": str(time.time())}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=LONGEST_RUN_SECONDS,
                cwd=scratch,
            )
        except subprocess.TimeoutExpired:
            return {"exit_code": None, "error": f"stopped after {LONGEST_RUN_SECONDS} s"}
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return {"exit_code": done.returncode, "error": "; ".join(lines[-2:])[-600:]}


def _with_rates(measured: dict[str, Any]) -> dict[str, Any]:
    return {
        **measured,
        "tokens_per_cpu_second": measured["tokens"] / measured["cpu_seconds"],
        "tokens_per_wall_second": measured["tokens"] / measured["wall_seconds"],
    }


def _say(run: dict[str, Any]) -> None:
    measured = run.get("measured")
    what = (
        f"{measured['tokens_per_cpu_second']:7.0f} tok/CPU s, {measured['tokens_per_wall_second']:7.0f} tok/wall s,"
        f" {measured['peak_rss_bytes'] / 1024**3:5.2f} GiB, first step {measured['first_step_seconds']:5.1f} s,"
        f" loss {measured['mean_loss'] or float('nan'):.3f}"
        if measured
        else f"failed: {run['error']}"
    )
    print(f"round {run['round']} {run['workload']:9} {run['contestant']:24} {what}", flush=True)


def _write(document: dict[str, Any], target: Path) -> None:
    """After every run, so that a stopped benchmark loses nothing."""
    document["summary"] = report.summarise(document["runs"])
    named = {name: {**facts, "model": Path(facts["model"]).name} for name, facts in document["workloads"].items()}
    written = {**document, "workloads": named}
    target.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(report.markdown(document), encoding="utf-8")


if __name__ == "__main__":
    main()
