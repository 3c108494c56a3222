"""The ops as they stand, on tensors and numbers; every backend has functions of the same names."""

from __future__ import annotations

import torch

from fusedadam.rules import ops


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
