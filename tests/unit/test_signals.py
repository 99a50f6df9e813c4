"""Signals set a flag; the second Ctrl-C stops at once; handlers come back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trimtab.train.signals import StopRequest


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_only_asks(name: str) -> None:
    before = signal.getsignal(signal.Signals[name])
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.Signals[name])
        assert stop.requested and stop.signal_name == name
    assert signal.getsignal(signal.Signals[name]) == before


def test_the_second_interrupt_stops_at_once() -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_is_touched() -> None:
    seen: list[bool] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
