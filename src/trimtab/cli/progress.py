"""What a training run shows while it works: a live line in a terminal, plain lines everywhere else."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trimtab.text import safe
from trimtab.units import format_bytes, format_count, format_seconds

PLAIN_INTERVAL_SECONDS = 10.0
SHORT_SECONDS = 2.0
BAR_CELLS = 20
_WINDOW_STEPS = 50

Event = Mapping[str, Any]


class Reporter:
    """A listener for `api.train`: keeps what a summary needs and shows the rest on stderr.

    Use it as a context manager, so that the terminal is left in order whatever happens.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False, emoji=False, markup=False)
        self.quiet = quiet
        self.first_metrics: dict[str, float] = {}
        """Metrics of the evaluation before the first step, where there was one."""
        self.metrics: dict[str, float] = {}
        self.train_seconds: float | None = None
        self.warnings: list[str] = []
        self._clock = clock
        self._last_plain = -float("inf")
        self._rates = _Rates()
        self._live: Live | None = None
        self._phases: dict[str, _Phase] = {}

    def __enter__(self) -> Reporter:
        if self.console.is_terminal and not self.quiet:
            self._live = Live("", console=self.console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        handler = _HANDLERS.get(str(event.get("kind")))
        if handler is not None:
            handler(self, event)

    # Handlers, one for each kind of event.

    def _on_phase(self, event: Event) -> None:
        name, done, total = str(event["name"]), event.get("done"), event.get("total")
        line = phase_line(event)
        if self._live is not None:
            self._show_live(line, (done or 0) / total if total else None)
            return
        phase = self._phases.setdefault(name, _Phase(self._clock()))
        if phase.is_due(self._clock(), counted=bool(total), ended=done == total):
            self._print(line)

    def _on_plan(self, event: Event) -> None:
        settings = event.get("settings") or ()
        if self.quiet or not settings:
            return
        if not self.console.is_terminal:
            for setting in settings:
                self._print(f"  {setting['name']}: {setting['value']} - {setting['reason']}")
            return
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        table.add_column("setting", no_wrap=True)
        table.add_column("value", no_wrap=True, max_width=40)
        table.add_column("why", style="dim")
        for setting in settings:
            table.add_row(*(Text(safe(str(setting[key]), limit=200)) for key in ("name", "value", "reason")))
        self.console.print(table)

    def _on_data(self, event: Event) -> None:
        for line in event.get("lines") or ():
            self._print(str(line))

    def _on_step(self, event: Event) -> None:
        self._rates.add(event)
        fields = step_fields(event, self._rates)
        step, steps = int(event["step"]), int(event["steps"])
        if self._live is not None:
            self._show_live("  ".join(_fit(fields, self.console.width - BAR_CELLS - 2)), step / max(steps, 1))
            return
        now = self._clock()
        if step in (1, steps) or now - self._last_plain >= PLAIN_INTERVAL_SECONDS:
            self._last_plain = now
            self._print("  ".join(fields))

    def _on_eval(self, event: Event) -> None:
        metrics = numbers(event.get("metrics"))
        if not self.metrics and int(event.get("step") or 0) == 0:
            self.first_metrics = metrics
        self.metrics = metrics
        best = "  (best so far)" if event.get("is_best") and event.get("step") else ""
        self._print(f"evaluation at step {event.get('step', 0)}: {metrics_line(metrics)}{best}")

    def _on_checkpoint(self, event: Event) -> None:
        if self._live is None:
            self._print(f"checkpoint at step {event.get('step')}: {format_bytes(float(event.get('bytes') or 0))}")

    def _on_warning(self, event: Event) -> None:
        line = " ".join(str(event.get(key) or "") for key in ("message", "cure")).strip()
        self.warnings.append(line)
        self._print(f"warning: {line}", style="yellow")

    def _on_resume(self, event: Event) -> None:
        step = event.get("step")
        self._print(f"going on after step {step}" if step else "beginning with the first step: no checkpoint was saved")

    def _on_done(self, event: Event) -> None:
        self.metrics = numbers(event.get("metrics")) or self.metrics
        seconds = event.get("train_seconds")
        self.train_seconds = float(seconds) if seconds is not None else None
        share = event.get("gemm_share")
        if share is not None:
            self._print(f"matrix products ran at {share:.0%} of the rate that this machine reached in a short test")

    def _print(self, line: str, style: str = "") -> None:
        if not self.quiet:
            self.console.print(Text(safe(line, newlines=True), style=style), soft_wrap=True)

    def _show_live(self, line: str, share: float | None) -> None:
        assert self._live is not None
        text = Text(overflow="ellipsis", no_wrap=True)
        if share is not None:
            filled = min(int(share * BAR_CELLS), BAR_CELLS)
            text.append("━" * filled, style="green")
            text.append("━" * (BAR_CELLS - filled) + "  ", style="bright_black")
        text.append(safe(line))
        self._live.update(text)


_HANDLERS: dict[str, Callable[[Reporter, Event], None]] = {
    "phase": Reporter._on_phase,  # pyright: ignore[reportPrivateUsage]
    "plan": Reporter._on_plan,  # pyright: ignore[reportPrivateUsage]
    "data": Reporter._on_data,  # pyright: ignore[reportPrivateUsage]
    "step": Reporter._on_step,  # pyright: ignore[reportPrivateUsage]
    "eval": Reporter._on_eval,  # pyright: ignore[reportPrivateUsage]
    "checkpoint": Reporter._on_checkpoint,  # pyright: ignore[reportPrivateUsage]
    "warning": Reporter._on_warning,  # pyright: ignore[reportPrivateUsage]
    "resume": Reporter._on_resume,  # pyright: ignore[reportPrivateUsage]
    "done": Reporter._on_done,  # pyright: ignore[reportPrivateUsage]
}


class _Phase:
    """When a stage before training is told in plain lines: at once if nothing is counted, else if it takes long."""

    def __init__(self, now: float) -> None:
        self._next = now + SHORT_SECONDS
        self._told = False

    def is_due(self, now: float, *, counted: bool, ended: bool) -> bool:
        due = now >= self._next or (self._told and ended) if counted else not self._told
        if due:
            self._next, self._told = now + PLAIN_INTERVAL_SECONDS, True
        return due


class _Rates:
    """Tokens per second and seconds per step over the last steps."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._tokens: deque[float] = deque(maxlen=_WINDOW_STEPS)

    def add(self, event: Event) -> None:
        self._seconds.append(float(event["step_seconds"]))
        self._tokens.append(float(event["tokens"]))

    def tokens_per_second(self) -> float:
        total = sum(self._seconds)
        return sum(self._tokens) / total if total > 0 else 0.0

    def seconds_per_step(self) -> float:
        # The median, so that one slow step (a checkpoint, a busy machine) does not move the time left.
        return statistics.median(self._seconds) if self._seconds else 0.0


def phase_line(event: Event) -> str:
    """`tokenise train  24%`."""
    done, total = event.get("done"), event.get("total")
    return f"{event['name']} ..." if done is None or not total else f"{event['name']}  {done / total:.0%}"


def step_fields(event: Event, rates: _Rates) -> list[str]:
    """What a step shows, the most telling first."""
    step, steps = int(event["step"]), int(event["steps"])
    fields = [f"step {step}/{steps}", f"loss {event['loss']:.4g}"]
    if event.get("applied") is False:
        fields[-1] += " (step left out)"
    if steps > step:
        fields.append(f"left {format_seconds(rates.seconds_per_step() * (steps - step))}")
    fields.append(f"epoch {event['epoch']:.2f}")
    fields.append(f"{format_count(round(rates.tokens_per_second()))} tokens/s")
    fields.append(f"lr {event['learning_rate']:.2e}")
    if event.get("grad_norm") is not None:
        fields.append(f"norm {event['grad_norm']:.3g}")
    if event.get("peak_bytes"):
        fields.append(f"mem {format_bytes(event['peak_bytes'])}")
    wait, seconds = event.get("data_wait_seconds") or 0.0, event["step_seconds"]
    if seconds > 0 and wait / seconds > 0.02:
        fields.append(f"waiting for data {wait / seconds:.0%}")
    return fields


def _fit(fields: list[str], width: int) -> list[str]:
    """The first fields that fit in `width` cells with two blanks between them; at least one."""
    kept, used = fields[:1], cell_len(fields[0])
    for field in fields[1:]:
        used += 2 + cell_len(field)
        if used > width:
            break
        kept.append(field)
    return kept


def numbers(metrics: Any) -> dict[str, float]:
    """The numeric entries of a dict of metrics."""
    if not isinstance(metrics, Mapping):
        return {}
    return {str(name): float(value) for name, value in metrics.items() if isinstance(value, (int, float))}


def metrics_line(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "no metrics"
