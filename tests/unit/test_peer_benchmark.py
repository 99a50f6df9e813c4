"""The report of the peers' benchmark: ratios between neighbours, goals, disturbed runs; and the choice of rows."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
sys.path[:0] = [str(PEERS), str(PEERS / "contenders")]

import report  # noqa: E402
import window  # noqa: E402
import workloads  # noqa: E402

FAST, SLOW = 1000.0, 200.0


def run(contestant: str, number: int, speed: float, probe: float = 1e12) -> dict[str, Any]:
    """One measured run as `run.py` records it."""
    rates = {"fp32": 1e11, "bf16": probe}
    measured = {
        "tokens_per_cpu_second": speed, "tokens_per_wall_second": speed, "peak_rss_bytes": 2**30,
        "first_step_seconds": 1.0, "tokens": 100, "slots": 150, "mean_loss": 1.0, "final_loss": 1.0,
    }  # fmt: skip
    return {
        "workload": "cls", "kind": "classification", "contestant": contestant, "round": number,
        "load_average": 0.0, "probe_before": rates, "probe_after": rates, "measured": measured,
    }  # fmt: skip


def test_ratios_are_taken_between_neighbours_of_a_round() -> None:
    runs = [
        run(name, number, speed * slower)
        for number, slower in ((1, 1.0), (2, 0.1), (3, 2.0))
        for name, speed in (("trimtab", FAST), ("trainer-bf16", SLOW))
    ]
    goals = report.summarise(runs)["goals"]
    assert [goal["rounds"] for goal in goals] == [pytest.approx([5.0, 5.0, 5.0])]
    assert goals[0]["met"]


def test_the_best_of_several_peers_counts() -> None:
    runs = [run("trimtab", 1, 1000.0), run("trainer-bf16-grouped", 1, 500.0), run("lightning-bf16-grouped", 1, 950.0)]
    (goal,) = report.summarise(runs)["goals"]
    assert goal["ratio"] == pytest.approx(1000 / 950)
    assert not goal["met"]


def test_a_run_on_a_slower_machine_is_marked() -> None:
    runs = [run("trimtab", 1, FAST), run("trainer-bf16", 1, SLOW, probe=3e11)]
    medians = report.summarise(runs)["medians"]["cls"]
    assert medians["trimtab"]["disturbed_rounds"] == 0
    assert medians["trainer-bf16"]["disturbed_rounds"] == 1


def test_a_failed_run_is_reported_and_counts_in_no_median() -> None:
    failed = {key: value for key, value in run("trl", 1, 1.0).items() if key != "measured"} | {"error": "no torch"}
    facts = {"title": "t", "timed_rows": 1, "batch_size": 1, "timed_tokens": 1, "padding": {"random": 1}}
    document = {
        "date": "2026-12-01",
        "machine": {"cpu": "a", "flags": [], "cores": 1, "torch": "2", "python": "3"},
        "settings": {"threads": 1, "rounds": 1},
        "workloads": {"cls": facts},
        "runs": [run("trimtab", 1, FAST), failed],
    }
    document["summary"] = report.summarise(document["runs"])
    page = report.markdown(document)
    assert "| trimtab | 1000 |" in page
    assert "- cls trl, round 1: no torch" in page


def test_timed_batches_have_the_lengths_of_the_whole_set() -> None:
    tokens = sorted(random.Random(0).choices(range(20, 257), k=4000))
    warmup, batches = workloads._choose([{"tokens": count} for count in tokens], 16, 16)
    timed = [row["tokens"] for batch in batches for row in batch]
    assert len(warmup) == 16 and len(timed) == 256
    assert sum(timed) / len(timed) == pytest.approx(sum(tokens) / len(tokens), rel=0.02)
    assert max(max(batch, key=_tokens)["tokens"] - min(batch, key=_tokens)["tokens"] for batch in batches) <= 3


def _tokens(row: dict[str, int]) -> int:
    return row["tokens"]


def test_padding_is_not_counted_as_tokens() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    allowed = torch.eye(4, dtype=torch.bool)[None, None] & mask[:, None, None, :].bool()
    added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    counted = [int(window.real_tokens(ids, one)) for one in (None, mask, allowed, added)]
    assert counted == [8, 5, 5, 5]


def test_the_warm_up_step_is_outside_the_window() -> None:
    clock = window.Window(steps=3)
    for tokens, loss in ((100, 9.0), (10, 2.0), (20, 4.0)):
        clock.count(tokens, 2 * tokens)
        clock.losses.append(loss)
        clock.step_done()
    document = clock.document()
    assert (document["steps"], document["tokens"], document["slots"]) == (2, 30, 60)
    assert document["mean_loss"] == pytest.approx(3.0)
