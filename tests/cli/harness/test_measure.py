"""Contestants that take turns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fusedadam.cli.harness import measure as module
from fusedadam.cli.harness.contestant import First, Turn
from fusedadam.cli.harness.measure import Conditions, Measured, bytes_moved, copied_per_ms, measure, rounds
from fusedadam.cli.harness.processes import Failed
from fusedadam.cli.harness.timing import Pace


def torch_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params)


def broken(params: list[torch.nn.Parameter]) -> Any:
    raise Failed("it is not installed")


def test_contestants_take_as_many_turns_as_asked_on_every_set_and_one_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", math.inf)  # other tests may use the machine
    makes = {"a": torch_adam, "broken": broken, "b": torch_adam}
    for shapes in ([(4,)], [(2, 2), (3,)]):
        own = measure(makes, shapes, "float32", Conditions("cpu", Pace(3, 1e-3)))
        assert list(own) == list(makes)
        assert [len(own[name].ms) for name in makes] == [3, 0, 3]
        assert [own[name].failed for name in makes] == [None, "it is not installed", None]
        assert own["a"].against_ours == [1.0] * 3
        assert len(own["b"].against_ours) == 3


def cannot_step(params: list[torch.nn.Parameter]) -> Any:
    optimizer = torch_adam(params)
    optimizer.step = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    return optimizer


def test_a_peer_that_raises_here_has_a_reason_in_one_line_and_ours_raises() -> None:
    conditions = Conditions("cpu", Pace(1, 1e-3))
    own = measure({"ours": torch_adam, "peer": cannot_step}, [(4,)], "float32", conditions)
    assert own["peer"].failed == "ZeroDivisionError: division by zero"
    assert own["ours"].ms
    with pytest.raises(ZeroDivisionError):
        measure({"ours": cannot_step, "peer": torch_adam}, [(4,)], "float32", conditions)


def test_a_contestant_may_be_compared_with_another_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def take_turns(started: Any, found: Any, conditions: Conditions) -> None:
        seen.append(list(started))
        for name in started:
            module._add(found[name], name, [{one: Turn(TIMES[one], 1.0, 0.0) for one in started}], conditions)

    TIMES = {"ours": 1.0, "8bit": 2.0, "fused": 3.0, "small": 5.0}
    monkeypatch.setattr(module, "_take_turns", take_turns)
    own = measure(dict.fromkeys(TIMES, torch_adam), [], "float32", Conditions("cpu", Pace(1, 1e-3)), {"small": "8bit"})
    assert seen == [["ours", "8bit", "fused"], ["8bit", "small"]]
    assert {name: one.against_ours for name, one in own.items()} == {
        "ours": [1.0], "8bit": [2.0], "fused": [3.0], "small": [2.5]
    }  # fmt: skip


def test_the_first_step_is_timed_once() -> None:
    own = Measured()
    own.begin(First(900.0, None, 80, 96))
    own.begin(First(3.0, None, 80, 96))
    assert own.first_ms == 900.0
    assert own.kept_bytes == 96


def test_states_that_are_not_on_the_device_move_an_unknown_number_of_bytes() -> None:
    ours = Measured(bytes_moved=28_000, state_bytes=8_000, allocated=8_192)
    assert bytes_moved(Measured(state_bytes=8_000, allocated=8_192), ours) == 28_000
    assert bytes_moved(Measured(state_bytes=16_000, allocated=0), ours) is None


def test_ours_takes_part_in_every_round() -> None:
    assert list(rounds(["fusedadam", "a", "b", "c"], at_once=3)) == [("fusedadam", "a", "b"), ("fusedadam", "c")]
    assert list(rounds(["fusedadam", "a", "b"], at_once=0)) == [("fusedadam", "a"), ("fusedadam", "b")]
    assert list(rounds(["fusedadam"], at_once=3)) == [("fusedadam",)]
    assert list(rounds(["fusedadam", "a", "b"], at_once=math.inf)) == [("fusedadam", "a", "b")]


def test_bars_of_the_same_length_mean_the_same_time() -> None:
    """Each process copies, but all are held against the same copy."""
    quiet, disturbed = Measured(copied_per_ms=[10.0, 10.0]), Measured(copied_per_ms=[10.0, 4.0])
    assert copied_per_ms([quiet, disturbed, Measured(failed="so")]) == 10.0


def test_a_peer_that_keeps_smaller_states_moves_fewerbytes_moved() -> None:
    ours = Measured(bytes_moved=28_000, state_bytes=8_000)
    assert bytes_moved(ours, ours) == 28_000
    assert bytes_moved(Measured(state_bytes=8_100), ours) == 28_000
    assert bytes_moved(Measured(state_bytes=2_000), ours) == 16_000
