"""How a call is timed."""

from __future__ import annotations

import time

from fusedadam.cli.harness.timing import Timer


def test_a_turn_is_many_calls_but_not_too_many() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.002)

    timer = Timer(step, "cpu", seconds=0.02)
    before = calls
    assert 2 <= timer.turn().ms < 100
    assert 1 <= calls - before <= 10
