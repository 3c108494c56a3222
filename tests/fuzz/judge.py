"""How far a stored value may be from the exact one: by docs/numerics.md, with some room.

A wrong sign, a stale gradient, a wrong count or an element left out is a thousand times further off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedadam.formats import compute_dtype
from tests.support import ulp

ULPS = 4  # of the dtype that is calculated in; 2 are promised for a step, and 3 for an average


class Expected(NamedTuple):
    """An exact result; the number whose ulps its error is measured in, the largest term that went into it; and the
    dtype that it was calculated in: float32, or float64 if nothing in float32 went into it."""

    value: Tensor
    size: Tensor
    compute: torch.dtype


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """That the parameters of these dtypes are calculated in, where a norm over all of them enters."""
    return min(map(compute_dtype, dtypes), key=lambda dtype: dtype.itemsize)


def compare(got: Tensor, expected: Expected, label: str) -> None:
    """Calculated in ``compute``, and rounded once to its storage."""
    value, size, compute = expected
    assert got.shape == value.shape, f"{label} has shape {tuple(got.shape)}, expected {tuple(value.shape)}"
    allowed = ULPS * ulp(size, compute)
    if torch.finfo(got.dtype).eps > torch.finfo(compute).eps:
        allowed = allowed + 0.5 * ulp(value, got.dtype)
    wrong = ~((got.double() - value).abs() <= allowed)
    if wrong.any():
        at = tuple(int(k) for k in wrong.nonzero()[0])
        raise AssertionError(
            f"{label}: element {at} is {got[at].item()!r}, expected {value[at].item()!r}; "
            f"{int(wrong.sum())} of {wrong.numel()} are wrong"
        )
