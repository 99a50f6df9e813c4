"""Trains in every precision and compares the losses with those of fp32, on models made on the spot.

`python benchmarks/gpu/precisions.py` on a machine with a card; `--device cpu --quick` is a smoke run of the logic.
"""

from __future__ import annotations

from typing import Any

from cases import read_setup, run_all, write

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "bf16_weights")
CPU_PRECISIONS = frozenset({"fp32", "bf16", "bf16_weights"})
ALLOWED_LOSS_SHARE = {"tf32": 0.01, "fp16": 0.03, "bf16": 0.03, "bf16_weights": 0.03}
"""How far the mean loss may lie from that of fp32, as a share of it."""


def main() -> int:
    setup = read_setup(__doc__ or "", "precisions", PRECISIONS)
    wanted = [name for name in setup.precisions if setup.device == "cuda" or name in CPU_PRECISIONS]
    results = run_all(setup, [setup.case("trimtab", kind, name) for kind in setup.kinds for name in wanted])
    failed = [result["name"] for result in results if "error" in result or not compare(result, results)]
    write(setup, results)
    print("all agree with fp32" if not failed else f"not as they should be: {', '.join(failed)}")
    return 1 if failed else 0


def compare(result: dict[str, Any], results: list[dict[str, Any]]) -> bool:
    """Notes the distance to fp32's mean loss in `result`; False where it is too far."""
    exact = next(
        (one for one in results if one["kind"] == result["kind"] and one["precision"] == "fp32" and "error" not in one),
        None,
    )
    if exact is None or result is exact:
        return True
    share = abs(result["mean_loss"] - exact["mean_loss"]) / exact["mean_loss"]
    result["loss_distance_share"] = share
    result["speed_against_fp32"] = result["tokens_per_second"] / exact["tokens_per_second"]
    return share <= ALLOWED_LOSS_SHARE[result["precision"]]


if __name__ == "__main__":
    raise SystemExit(main())
