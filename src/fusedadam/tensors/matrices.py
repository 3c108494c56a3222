"""Tensors as matrices, and matrices in float16, whose range is small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The largest value becomes one from 2**14 to 2**15, of the 2**16 that float16 holds. The exponent of a float32 is
# stored with 127 added to it, and powers of two of either sign go up to 126
LARGEST_EXPONENT, MOST_SHIFTED, MANTISSA_BITS = 127 + 14, 126, 23
ROUNDED_UP = 1 << 12  # half of the last bit that float16 has of a float32: all ones round to the next power of two


class Matrices(NamedTuple):
    """A tensor as matrices: two dimensions are one, three a stack of them, and more are one row for each index of the
    first, as the weights of a convolution."""

    depth: int  # of the stack
    rows: int
    columns: int


def matrices_of(shape: Sequence[int]) -> Matrices:
    """``shape``: of two dimensions or more."""
    if len(shape) == 3:
        return Matrices(*shape)
    return Matrices(1, shape[0], math.prod(shape[1:]))


def largest(matrices: Tensor) -> Tensor:
    """The largest absolute value of each matrix, or of each part of one."""
    if matrices.numel() == 0:
        return matrices.new_zeros(len(matrices))
    found: Tensor = torch.linalg.vector_norm(matrices.flatten(1), math.inf, dim=1)
    return found


def shifts_for(largest: Tensor) -> Tensor:
    """The powers of two that take matrices with these largest values, float32, to the upper end of float16, as
    integers: small values keep their bits. They are the same for the narrowed matrices."""
    exponents = (largest.view(torch.int32) + ROUNDED_UP) >> MANTISSA_BITS
    return (LARGEST_EXPONENT - exponents).clamp_(-MOST_SHIFTED, MOST_SHIFTED)


def narrowed(matrices: Tensor, shifts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """In the dtype of the products; times powers of two, which change no bit of a float32, for float16, whose range is
    smaller."""
    if shifts is None:
        return matrices.to(dtype)
    factors = torch.exp2(shifts.to(matrices.dtype)).view(-1, *[1] * (matrices.dim() - 1))
    return (matrices * factors).to(dtype)


def widen(narrow: Tensor, shifts: Tensor | None, out: Tensor) -> None:
    """The inverse of ``narrowed`` for a stack of matrices, which adds no rounding of its own."""
    if shifts is None:
        out.copy_(narrow)
    else:
        torch.mul(narrow.to(out.dtype), torch.exp2(-shifts.to(out.dtype)).view(-1, 1, 1), out=out)
