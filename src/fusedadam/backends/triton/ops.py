"""The ops for Triton, for values of float32 and (with ``64``) of float64.

Triton's plain ``/`` and ``sqrt`` are approximations in float32 and its ``maximum`` drops NaN; the ones here do neither.
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
def bits_of_float(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def narrow(x):
    return x.to(tl.float32)


@triton.jit
def widen(x):
    return x.to(tl.float64)


@triton.jit
def largest_word(words):
    """Of each block, which is the last dimension."""
    return tl.max(words, axis=len(words.shape) - 1)


@triton.jit
def index_of(i, extent1, extent2, jump1, jump2, jump3):
    """See ``fusedadam.tensors.shards.IndexMap``."""
    rest = i % extent1
    return i // extent1 * jump1 + rest // extent2 * jump2 + rest % extent2 * jump3


INTERPRETED = not isinstance(sqrt, JITFunction)
