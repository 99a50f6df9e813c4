"""Trimtab against a plain transformers.Trainer loop: tokens per second and peak bytes, same model, data and batch size.

`python benchmarks/gpu/against_trainer.py` on a machine with a card; `--device cpu --quick` is a smoke run of the logic.
"""

from __future__ import annotations

from typing import Any

from cases import read_setup, run_all, write

PRECISIONS = ("bf16", "fp16", "tf32")


def main() -> int:
    setup = read_setup(__doc__ or "", "against-trainer", PRECISIONS)
    wanted = [name for name in setup.precisions if setup.device == "cuda" or name == "bf16"]
    cases = [
        setup.case(engine, kind, name) for kind in setup.kinds for name in wanted for engine in ("trainer", "trimtab")
    ]
    results = run_all(setup, cases)
    for ratio in ratios(results):
        print(f"{ratio['kind']} {ratio['precision']}: {ratio['speed']:.2f} x the speed, {ratio['peak']:.2f} x the peak")
    write(setup, results)
    return 1 if any("error" in result for result in results) else 0


def ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Trimtab's speed and peak as a multiple of Trainer's, kept in Trimtab's result too."""
    found: list[dict[str, Any]] = []
    for ours in results:
        peer = next((one for one in results if _same(one, ours) and one["engine"] == "trainer"), None)
        if ours["engine"] != "trimtab" or peer is None or "error" in ours or "error" in peer:
            continue
        peak = "peak_allocated_bytes" if "peak_allocated_bytes" in ours else "peak_rss_bytes"
        ours["against_trainer"] = {
            "kind": ours["kind"],
            "precision": ours["precision"],
            "speed": ours["tokens_per_second"] / peer["tokens_per_second"],
            "peak": ours[peak] / peer[peak],
        }
        found.append(ours["against_trainer"])
    return found


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["kind"], one["precision"]) == (other["kind"], other["precision"])


if __name__ == "__main__":
    raise SystemExit(main())
