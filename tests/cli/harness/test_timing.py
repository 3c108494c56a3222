"""How a call is timed."""

from __future__ import annotations

import itertools
import time

import pytest

from fusedadam.cli.harness import timing
from fusedadam.cli.harness.timing import Timed, Timer


def test_a_turn_is_many_calls_but_not_too_many() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    timer = Timer(step, "cpu", seconds=0.02)
    before, began = calls, time.perf_counter()
    assert 2 <= timer.turn().ms <= 1e3 * (time.perf_counter() - began)
    assert 1 <= calls - before <= 10


def test_calls_that_waited_for_a_core_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.cycle([0.002, 0.002, 0.5])
    timer = Timer(lambda: None, "cpu", seconds=1e-6)
    timer.calls = 9
    monkeypatch.setattr(timer, "_watched", lambda: Timed(1e3 * (seconds := next(times)), float(seconds > 0.1)))
    assert timer.turn() == Timed(2.0, 0.0)
    monkeypatch.setattr(timer, "_watched", lambda: Timed(500.0, 1.0))
    assert timer.turn().ms == 500.0, "all of them did"


def test_what_a_call_needs_beforehand_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(timing, "waiting_for", lambda device: lambda: said.append("wait"))
    for device in ("cpu", "cuda"):
        timer = Timer(
            lambda: said.append("step"), device, 1e-6, before=lambda: (said.append("before"), time.sleep(0.01))
        )
        said.clear()
        assert timer.turn().ms < 5
        assert said == ["before", "wait", "step", "wait"] * timer.calls
