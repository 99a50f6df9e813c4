"""A small card imitated by a share of a big one's memory: what Trainer and Trimtab do at the same batch size.

`python benchmarks/gpu/small_card.py [--device cpu --quick]`. Trimtab must finish on every size, with the losses of the
whole card; Trainer may run out of memory. On a CPU nothing is imitated and only the logic runs.
"""

from __future__ import annotations

from typing import Any

from cases import read_setup, run_all, write

GIB = 1024**3
CARD_BYTES = (None, 12 * GIB, 8 * GIB, 6 * GIB)
"""The whole card first: its losses are what the others are compared with."""
PRECISIONS = ("bf16",)
ALLOWED_LOSS_SHARE = 0.01
"""Another cut into micro-batches changes the losses by rounding, and by other random bits in dropout."""


def main() -> int:
    setup = read_setup(__doc__ or "", "small-card", PRECISIONS)
    sizes = CARD_BYTES if setup.device == "cuda" else CARD_BYTES[:1]
    changes: dict[str, Any] = {} if setup.quick else {"batch_size": 64, "max_length": 1024, "steps": 10, "warmup": 2}
    cases = [
        setup.case(engine, kind, name, card_bytes=size, name=_name(engine, kind, name, size), **changes)
        for kind in setup.kinds
        for name in setup.precisions
        for size in sizes
        for engine in ("trimtab", "trainer")
    ]
    results = run_all(setup, cases)
    failed = [one["name"] for one in results if one["engine"] == "trimtab" and not as_it_should_be(one, results)]
    write(setup, results)
    print("Trimtab finished on every size" if not failed else f"not as they should be: {', '.join(failed)}")
    return 1 if failed else 0


def as_it_should_be(result: dict[str, Any], results: list[dict[str, Any]]) -> bool:
    """Finished, within the card's memory, with the losses of the whole card."""
    whole = next(
        one
        for one in results
        if (one["kind"], one["precision"], one["engine"]) == (result["kind"], result["precision"], "trimtab")
    )
    if "error" in result or "error" in whole:
        return False
    share = abs(result["mean_loss"] - whole["mean_loss"]) / whole["mean_loss"]
    result["loss_distance_share"] = share
    fits = result["card_bytes"] is None or result["peak_reserved_bytes"] <= result["card_bytes"]
    return fits and share <= ALLOWED_LOSS_SHARE


def _name(engine: str, kind: str, precision: str, size: int | None) -> str:
    return f"{kind} {engine} {precision} on {'the whole card' if size is None else f'{size // GIB} GiB'}"


if __name__ == "__main__":
    raise SystemExit(main())
