"""The ops as they stand, on tensors and numbers; every backend has functions of the same names."""

from __future__ import annotations

import math

import pytest
import torch

from fusedadam import Scalar, Value, Values, rule
from fusedadam.rules import ops
from fusedadam.rules.ops import clamp, sign
from tests.support import BF16, F32, F64, PLACES, Case, apply


def test_every_backend_has_every_op():
    from fusedadam.backends.numba import ops as for_numba
    from fusedadam.backends.triton import ops as for_triton

    for name in ops.OPS:
        assert hasattr(for_numba, name)
        assert hasattr(for_triton, name)


def test_ops_propagate_nan_from_either_side():
    nan, one = torch.tensor(float("nan")), torch.tensor(1.0)
    for op in (ops.maximum, ops.minimum):
        assert torch.isnan(op(nan, one))
        assert torch.isnan(op(one, nan))
        assert op(float("nan"), 1.0) != op(float("nan"), 1.0)


@rule(scalars=lambda step, lr: {"lr": lr, "twice": 2 * lr})
def signs(param: Value, grad: Value, clamped: Value, *, lr: Scalar, twice: Scalar) -> Values:
    clamped = clamp(grad, lr, twice)
    param = sign(grad)
    return param, clamped


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
def test_sign_and_clamp_are_the_same_on_every_backend(place, dtype):
    grad = torch.tensor([-2.0, -0.0, 0.0, 0.5, 0.75, 3.0, math.inf, -math.inf, math.nan], dtype=dtype)
    roles = {"param": grad * 0, "grad": grad, "clamped": grad * 0}
    (got,) = apply(Case(signs, {}, {"lr": 0.5}), [roles], place)
    expected = torch.tensor([-1.0, -0.0, 0.0, 1.0, 1.0, 1.0, 1.0, -1.0, math.nan], dtype=dtype)
    assert torch.equal(got["param"].nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(got["clamped"].nan_to_num(7), grad.clamp(0.5, 1.0).nan_to_num(7))


def test_sign_and_clamp_of_numbers():
    """For scalars."""
    assert [sign(x) for x in (-3.0, 0.0, 2.0)] == [-1.0, 0.0, 1.0]
    assert [clamp(x, 0.0, 1.0) for x in (-3.0, 0.5, 2.0)] == [0.0, 0.5, 1.0]
