"""What is shown while training, from the events alone."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from trimtab.cli.progress import Reporter


def step(number: int, steps: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "steps": steps,
        "epoch": number / steps,
        "loss": 1.25,
        "grad_norm": 0.5,
        "learning_rate": 2e-5,
        "tokens": 1000,
        "target_tokens": 16,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.0,
        "peak_bytes": 3 * 1024**3,
        "applied": True,
        **more,
    }


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(events: list[dict[str, Any]], clock: Clock | None = None, seconds_each: float = 0.0) -> str:
    stream = io.StringIO()
    clock = clock or Clock()
    with Reporter(console=Console(file=stream, width=200), clock=clock) as reporter:
        for event in events:
            reporter(event)
            clock.now += seconds_each
    return stream.getvalue()


def test_without_a_terminal_steps_are_plain_lines_now_and_then() -> None:
    lines = plain([step(n, 40) for n in range(1, 41)], seconds_each=1.0).splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", "11/40", "21/40", "31/40", "40/40"]


def test_a_step_line_tells_what_matters() -> None:
    line = plain([step(1)])
    for part in ("step 1/10", "loss 1.25", "left 4.5 s", "epoch 0.10", "2,000 tokens/s", "lr 2.00e-05", "norm 0.5"):
        assert part in line
    assert "mem 3.0 GiB" in line
    assert "waiting" not in line


def test_waiting_for_data_is_told_above_two_percent() -> None:
    assert "waiting for data 10%" in plain([step(1, data_wait_seconds=0.05)])


def test_a_step_that_was_left_out_says_so() -> None:
    assert "loss nan (step left out)" in plain([step(1, loss=float("nan"), applied=False, grad_norm=None)])


def test_the_plan_names_setting_value_and_reason() -> None:
    text = plain([{"kind": "plan", "settings": [{"name": "precision", "value": "bf16", "reason": "2.1x faster"}]}])
    assert "precision: bf16 - 2.1x faster" in text


def test_stages_are_told_only_if_they_take_long() -> None:
    stage = [{"kind": "phase", "name": "tokenise train", "done": n, "total": 20} for n in range(21)]
    assert plain(stage) == ""
    lines = plain(stage, seconds_each=1.0).splitlines()
    assert lines == ["tokenise train  10%", "tokenise train  60%", "tokenise train  100%"]
    assert plain([{"kind": "phase", "name": "ask the model"}] * 2).splitlines() == ["ask the model ..."]


def test_warnings_are_shown_and_kept_and_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    reporter = Reporter(console=Console(file=stream, width=200))
    reporter({"kind": "warning", "message": "bad \x1b[2J row.", "cure": "Fix it."})
    assert stream.getvalue() == "warning: bad \\x1b[2J row. Fix it.\n"
    assert reporter.warnings == ["bad \x1b[2J row. Fix it."]


def test_the_first_and_the_last_metrics_are_kept() -> None:
    reporter = Reporter(console=Console(file=io.StringIO()))
    reporter({"kind": "eval", "step": 0, "metrics": {"accuracy": 0.2}, "seconds": 1, "is_best": True})
    reporter({"kind": "eval", "step": 9, "metrics": {"accuracy": 0.8}, "seconds": 1, "is_best": True})
    reporter({"kind": "done", "step": 9, "metrics": {"accuracy": 0.9}, "model": "m", "train_seconds": 3.5})
    assert reporter.first_metrics == {"accuracy": 0.2}
    assert reporter.metrics == {"accuracy": 0.9}
    assert reporter.train_seconds == 3.5


def test_a_resume_says_where_it_goes_on() -> None:
    assert plain([{"kind": "resume", "step": 5, "checkpoint": "c"}]) == "going on after step 5\n"
    assert "no checkpoint" in plain([{"kind": "resume", "step": 0, "checkpoint": None}])


def test_in_a_terminal_the_line_fits_its_width_and_the_terminal_is_left_in_order() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60, color_system=None)
    with Reporter(console=console) as reporter:
        reporter({"kind": "phase", "name": "load model", "done": None, "total": None})
        reporter({"kind": "plan", "settings": [{"name": "threads", "value": "2", "reason": "measured"}]})
        reporter(step(3, loss=1.5))
        reporter({"kind": "data", "lines": ["10 rows [bold]used[/bold]"]})
    text = stream.getvalue()
    assert "threads" in text
    assert "[bold]used[/bold]" in text, "data text is no markup"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") >= 1, "the cursor is shown again"


def test_unknown_events_are_passed_over() -> None:
    assert plain([{"kind": "something_new"}]) == ""
