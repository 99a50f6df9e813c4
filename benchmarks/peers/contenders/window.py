"""The clock that every contender carries: one warm-up step, then the timed window, then a result file.

Imports nothing but the standard library at the top, so that a contender's own imports are inside its time to the first
step. Torch is imported where the contender has done so already.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED_VARIABLE = "BENCHMARK_STARTED"
"""Unix time at which the runner started this process."""


@dataclass
class Mark:
    """Clocks and counters at one moment."""

    cpu_seconds: float
    wall_seconds: float
    tokens: int
    slots: int


@dataclass
class Window:
    """Counts real tokens and slots, and takes the clocks after the warm-up step and after the last one."""

    steps: int
    result: Path | None = None
    """Where `finish` writes."""
    warmup: int = 1
    """Steps before the timed ones."""
    tokens: Any = 0
    """An int, or a tensor on the card, so that counting does not wait for it."""
    slots: int = 0
    done: int = 0
    losses: list[float] = field(default_factory=list)
    started_at: float = field(default_factory=lambda: float(os.environ.get(STARTED_VARIABLE, time.time())))
    first_step_seconds: float = 0.0
    base_rss_bytes: int = 0
    peak_rss_bytes: int = 0
    at_end: Callable[[], None] | None = None
    """Called after the last step, for contenders that would go on to do other things."""
    _begin: Mark | None = None
    _end: Mark | None = None

    def count(self, tokens: Any, slots: int) -> None:
        """Adds what a forward computes: real tokens, and positions with padding."""
        self.tokens = self.tokens + tokens
        self.slots += slots

    def ready(self) -> None:
        """Marks the memory held before training, for comparison with the peak."""
        self.base_rss_bytes = peak_rss_bytes()

    def step_done(self) -> None:
        """Called after every optimizer step."""
        self.done += 1
        if self.done == 1:
            self.first_step_seconds = time.time() - self.started_at
        if self.done == self.warmup:
            self._begin = self.mark()
        if self.done == self.steps:
            self._end = self.mark()
            self.peak_rss_bytes = peak_rss_bytes()
            if self.at_end is not None:
                self.at_end()

    def mark(self) -> Mark:
        """The clocks now. Counts may still lie on a card; reading them waits for it."""
        return Mark(time.process_time(), time.perf_counter(), int(self.tokens), self.slots)

    def document(self, **more: Any) -> dict[str, Any]:
        """The result. Raises SystemExit where the last step was not reached."""
        if self._begin is None or self._end is None:
            raise SystemExit(f"only {self.done} of {self.steps} optimizer steps were seen")
        timed = self.losses[self.warmup : self.steps]
        return {
            "steps": self.steps - self.warmup,
            "tokens": self._end.tokens - self._begin.tokens,
            "slots": self._end.slots - self._begin.slots,
            "cpu_seconds": self._end.cpu_seconds - self._begin.cpu_seconds,
            "wall_seconds": self._end.wall_seconds - self._begin.wall_seconds,
            "first_step_seconds": self.first_step_seconds,
            "base_rss_bytes": self.base_rss_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "mean_loss": sum(timed) / len(timed) if timed else None,
            "final_loss": timed[-1] if timed else None,
            **more,
        }

    def finish(self, **more: Any) -> None:
        """Writes the result and leaves at once: what a contender does after training is not compared."""
        assert self.result is not None
        self.result.write_text(json.dumps(self.document(**more)), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)

    def watch_optimizers(self) -> None:
        """Counts the steps of whatever torch optimizer the contender uses."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: self.step_done())

    def watch_forwards(self, model: Any) -> None:
        """Counts the real tokens of every forward that `model` makes in training."""
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.count(real_tokens(input_ids, kwargs.get("attention_mask")), input_ids.numel())


def real_tokens(input_ids: Any, attention_mask: Any) -> Any:
    """Positions that are not padding. Without a mask all are real; in a 4-D mask padding does not see itself."""
    if attention_mask is None:
        return input_ids.numel()
    if attention_mask.dim() == 2:
        return (attention_mask != 0).sum()
    itself = attention_mask.diagonal(dim1=-2, dim2=-1)
    return (itself == 0 if itself.dtype.is_floating_point else itself).sum()


def peak_rss_bytes() -> int:
    """Peak resident memory of this process so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
