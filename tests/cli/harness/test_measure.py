"""Contestants that take turns."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fusedadam.cli.harness import measure as module
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
