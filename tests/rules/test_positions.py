"""Positions are ordered as they are run: round after round, phase after phase."""

from __future__ import annotations

import pytest

from fusedadam.rules.positions import START, Phase, Position


def test_phases_follow_each_other_and_then_comes_the_next_round():
    in_order = [Position(r, phase) for r in range(3) for phase in Phase]
    assert in_order == sorted(in_order)
    assert [one.next for one in in_order[:-1]] == in_order[1:]
    assert list(START.until(Position(1, Phase.ROW))) == in_order[1:11]
    assert list(START.next.until(START)) == []


@pytest.mark.parametrize(
    ("begin", "space", "expected"),
    [
        (START, "element", START),
        (START, "row", Position(0, Phase.ROW)),
        (Position(0, Phase.TENSOR), "row", Position(0, Phase.ROW_AFTER_DECISION)),
        (Position(2, Phase.TENSOR).next, "tensor", Position(2, Phase.TENSOR_AFTER_SHARED_SUMS)),
        (Position(0, Phase.ROW_AFTER_DECISION), "tensor", Position(1, Phase.TENSOR)),
        (Position(1, Phase.ROW), "element", Position(2)),
        (Position(0, Phase.COLUMN_SUMS), "column", Position(0, Phase.COLUMN)),
    ],
)
def test_the_first_position_of_a_space_from_here_on(begin, space, expected):
    assert begin.first_in(space) == expected
