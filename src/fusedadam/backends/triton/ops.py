"""The words for Triton, for values of float32 and (with ``64``) of float64.

Triton's plain ``/`` and ``sqrt`` are approximations in float32 and its ``maximum`` drops NaN: these are not.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def sqrt64(x):
    return tl.sqrt(x)


@triton.jit
def divide(a, b):
    return tl.div_rn(a, b)


@triton.jit
def divide64(a, b):
    return a / b


@triton.jit
def number(x):
    return tl.full((), x, tl.float32)


@triton.jit
def number64(x):
    return tl.full((), x, tl.float64)


@triton.jit
def abs(x):  # noqa: A001
    return tl.abs(x)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def power(x, y):
    # libdevice's own does not run under the interpreter
    return tl.exp2(y.to(tl.float64) * tl.log2(x.to(tl.float64))).to(x.dtype)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def fold(lanes, ROWS: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr):
    """Neighbours in pairs, and so on until one is left; see fusedadam.rules.sums. A reduction over two has no order."""
    for k in tl.static_range(LOG):
        pairs = tl.reshape(lanes, (ROWS, LANES >> (k + 1), 2))
        if LARGEST:
            lanes = tl.reduce(pairs, 2, maximum)
        else:
            lanes = tl.reduce(pairs, 2, _add)
    return tl.reshape(lanes, (ROWS,))


@triton.jit
def float_to_bf16(x):
    # by integers, to nearest even: the interpreter's own conversion truncates
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to_odd(x):
    # float64 to float32 such that rounding once more, to 16 bits, is as good as rounding only once
    near = x.to(tl.float32)
    back = near.to(tl.float64)
    bits = near.to(tl.uint32, bitcast=True)
    neighbour = tl.where(tl.abs(back) < tl.abs(x), bits + 1, bits - 1)
    move = ((bits & 1) == 0) & (back != x) & (x == x)
    return tl.where(move, neighbour, bits).to(tl.float32, bitcast=True)


INTERPRETED = not isinstance(sqrt, JITFunction)
