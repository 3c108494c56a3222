"""The eager backend's own: numbers in the compute dtype, and slices that keep temporaries small."""

from __future__ import annotations

import pytest
import torch

from fusedadam.backends import eager
from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS
from fusedadam.formats.tensors import load, store
from fusedadam.rules.ops import where
from fusedadam.rules.rule import Value, Values, rule
from tests.support import PLACES, Case, apply, assert_same_bits, draw


def no_scalars(step):
    return {}


@rule(scalars=no_scalars)
def literals(param: Value, grad: Value) -> Values:
    param = where(grad > 0, 0.1, 0.2) + (0.7 - 0.1) * grad / 3
    return param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_among_themselves_are_calculated_in_the_compute_dtype(dtype):
    """Eagerly they were Python's own, in float64 or in the default dtype."""
    case = Case(literals, {}, {})
    roles = draw(case, [(100,)], [dtype])
    first, *others = [apply(case, roles, p.values[0]) for p in PLACES[:2]]
    for other in others:
        assert_same_bits(first, other)


def test_what_is_loaded_is_a_copy():
    """A rule may store one role in another, and must not see what has been stored already."""
    for one in (FORMATS[name] for name in FORMAT_OF_DTYPE.values()):
        kept = torch.ones(4, dtype=one.arrays[0].dtype)
        value = load(one, [kept], torch.float32)
        store(one, [kept], value + 1)
        assert value.eq(1).all()
        assert kept.eq(2).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 5), (2, eager.SLICE + 1), (eager.SLICE, 2), (4, 0)])
def test_slices_cover_everything_once_and_stay_small(rows, width):
    slices = list(eager._slices(rows, width))
    sizes = [(r.stop - r.start) * (c.stop - c.start) for r, c in slices]
    assert sum(sizes) == rows * width
    assert max(sizes, default=0) <= eager.SLICE
