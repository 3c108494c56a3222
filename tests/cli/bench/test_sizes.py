"""Sizes that suit a machine."""

from __future__ import annotations

from fusedadam.cli.bench import sized
from fusedadam.cli.bench.report import Set
from fusedadam.cli.harness import shapes
from fusedadam.cli.harness.measure import Conditions
from fusedadam.cli.harness.timing import Pace

FAST, SLOW = 1e4, 10.0  # GB/s


def test_sets_are_scaled_to_memory_and_time() -> None:
    roomy = Conditions("cpu", Pace(1, 0.1), free_bytes=2**40)
    assert sized("gpt", shapes.gpt(), "float32", None, 25.0, FAST, roomy)[0].divided_by == 1
    smaller = sized("gpt", shapes.gpt(), "float32", None, 25.0, SLOW, roomy)[0]
    assert smaller == Set("gpt", 146, 7_799_808, 4)
    tight = Conditions("cpu", Pace(1, 0.1), free_bytes=2**31)
    assert sized("gpt", shapes.gpt(), "float32", None, 25.0, FAST, tight)[0].divided_by == 4
    assert sized("gpt", shapes.gpt(), "float32", 2, 25.0, SLOW, tight)[0].divided_by == 2
    assert shapes.shrunk([(64, 3, 7, 7), (1,)], 4) == [(16, 3, 7, 7), (1,)]
