"""Medians over rounds, ratios of neighbours, and the Markdown table."""

from __future__ import annotations

from statistics import median
from typing import Any

from contestants import CONTESTANTS, GOALS, Goal

DISTURBED_SHARE = 0.75
"""A run whose probes fell below this share of the best probe is marked: the machine was slower then."""
_GIB, _GFLOP = 1024**3, 1e9

Run = dict[str, Any]


def summarise(runs: list[Run]) -> dict[str, Any]:
    """`{workload: {contestant: medians}}`, and the goals with the ratios reached."""
    mark_disturbed(runs)
    workloads = sorted({run["workload"] for run in runs})
    return {
        "medians": {workload: _medians([run for run in runs if run["workload"] == workload]) for workload in workloads},
        "goals": [
            result
            for workload in workloads
            for goal in GOALS
            if (result := _reached(goal, workload, [run for run in runs if run["workload"] == workload]))
        ],
    }


def mark_disturbed(runs: list[Run]) -> None:
    """Sets `disturbed` by the probes of each run against the best of all, in the type that varies most (bf16)."""
    rates = [run["probe_before"]["bf16"] for run in runs] + [run["probe_after"]["bf16"] for run in runs]
    for run in runs:
        slowest = min(run["probe_before"]["bf16"], run["probe_after"]["bf16"])
        run["disturbed"] = slowest < DISTURBED_SHARE * max(rates)


def _medians(runs: list[Run]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in CONTESTANTS:
        good = [run["measured"] for run in runs if run["contestant"] == name and "measured" in run]
        if not good:
            continue
        found[name] = {
            "rounds": len(good),
            "disturbed_rounds": sum(run["disturbed"] for run in runs if run["contestant"] == name),
            "tokens_per_cpu_second": median(one["tokens_per_cpu_second"] for one in good),
            "tokens_per_cpu_second_range": [
                min(one["tokens_per_cpu_second"] for one in good),
                max(one["tokens_per_cpu_second"] for one in good),
            ],
            "tokens_per_wall_second": median(one["tokens_per_wall_second"] for one in good),
            "peak_rss_bytes": median(one["peak_rss_bytes"] for one in good),
            "first_step_seconds": median(one["first_step_seconds"] for one in good),
            "padding": median(one["slots"] / one["tokens"] for one in good),
            "mean_loss": _median_or_none([one["mean_loss"] for one in good]),
            "final_loss": _median_or_none([one["final_loss"] for one in good]),
        }
    return found


def _median_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _reached(goal: Goal, workload: str, runs: list[Run]) -> dict[str, Any] | None:
    """The median over rounds of Trimtab's figure against the best peer's of the same round."""
    if not runs or runs[0]["kind"] != goal.kind:
        return None
    ratios = []
    for number in sorted({run["round"] for run in runs}):
        figures = {
            run["contestant"]: run["measured"][goal.figure]
            for run in runs
            if run["round"] == number and "measured" in run
        }
        peers = [figures[name] for name in goal.against if name in figures]
        if goal.trimtab in figures and peers:
            ratios.append(figures[goal.trimtab] / (max(peers) if goal.higher_is_better else min(peers)))
    if not ratios:
        return None
    ratio = median(ratios)
    met = ratio >= goal.wanted if goal.higher_is_better else ratio <= goal.wanted
    return {
        "workload": workload,
        "trimtab": goal.trimtab,
        "figure": goal.figure,
        "against": goal.says,
        "wanted": goal.wanted,
        "ratio": ratio,
        "rounds": ratios,
        "met": met,
    }


def markdown(document: dict[str, Any]) -> str:
    """The whole result as a page."""
    machine, settings = document["machine"], document["settings"]
    lines = [
        f"# Peers, {document['date']}",
        "",
        f"{machine['cpu']} ({', '.join(machine['flags'])}), {machine['cores']} cores of which {settings['threads']}"
        f" used and pinned, torch {machine['torch']}, Python {machine['python']}. {settings['rounds']} interleaved"
        " rounds; medians. tok/s counts real tokens.",
        "",
        _probe_line(document["runs"]),
        "",
    ]
    for workload, medians in document["summary"]["medians"].items():
        lines += _workload_table(workload, document["workloads"][workload], medians)
    lines += _goal_table(document["summary"]["goals"])
    lines += _failures(document["runs"])
    return "\n".join(lines) + "\n"


def _probe_line(runs: list[Run]) -> str:
    rates = [run[when]["bf16"] / _GFLOP for run in runs for when in ("probe_before", "probe_after")]
    exact = [run[when]["fp32"] / _GFLOP for run in runs for when in ("probe_before", "probe_after")]
    loads = [run["load_average"] for run in runs if run["load_average"] is not None]
    busy = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return (
        f"Probe (1024-square product, before and after each run): bf16 {min(rates):.0f} to {max(rates):.0f} GFLOP/s,"
        f" median {median(rates):.0f}; fp32 {min(exact):.0f} to {max(exact):.0f}, median {median(exact):.0f}{busy}."
    )


def _workload_table(workload: str, facts: dict[str, Any], medians: dict[str, Any]) -> list[str]:
    lines = [
        f"## {workload}: {facts['title']}",
        "",
        f"{facts['timed_rows']} rows timed after one warm-up step, {facts['batch_size']} a step,"
        f" {facts['timed_tokens']} tokens; random batches pad {facts['padding']['random']:.2f} positions a token.",
        "",
        "| | tok/CPU s | range | tok/wall s | peak GiB | first step s | padding | mean loss | disturbed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(medians.items(), key=lambda item: -item[1]["tokens_per_cpu_second"]):
        low, high = row["tokens_per_cpu_second_range"]
        loss = "" if row["mean_loss"] is None else f"{row['mean_loss']:.3f}"
        lines.append(
            f"| {name} | {row['tokens_per_cpu_second']:.0f} | {low:.0f} to {high:.0f} |"
            f" {row['tokens_per_wall_second']:.0f} | {row['peak_rss_bytes'] / _GIB:.2f} |"
            f" {row['first_step_seconds']:.1f} | {row['padding']:.2f} | {loss} |"
            f" {row['disturbed_rounds']} of {row['rounds']} |"
        )
    return [*lines, ""]


def _goal_table(goals: list[dict[str, Any]]) -> list[str]:
    if not goals:
        return []
    lines = ["## Ratios", "", "| workload | what | against | wanted | reached | |", "|---|---|---|---|---|---|"]
    for goal in goals:
        sign = "at least" if goal["figure"] == "tokens_per_cpu_second" else "at most"
        lines.append(
            f"| {goal['workload']} | {goal['trimtab']} | {goal['against']} | {sign} {goal['wanted']:g} |"
            f" {goal['ratio']:.2f} | {'met' if goal['met'] else 'not met'} |"
        )
    return [*lines, ""]


def _failures(runs: list[Run]) -> list[str]:
    failed = [run for run in runs if "measured" not in run]
    if not failed:
        return []
    lines = ["## Not measured", ""]
    return lines + [f"- {run['workload']} {run['contestant']}, round {run['round']}: {run['error']}" for run in failed]
