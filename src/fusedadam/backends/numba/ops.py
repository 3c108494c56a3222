"""The ops for Numba: functions that rules call, and 32-bit integers, which codecs compute with."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusedadam.backends.numba.calling import inline

__all__ = ["NUMBER", "abs", "divide", "maximum", "minimum", "power", "sqrt", "where"]
__all__ += ["bits_of_float", "float_of_bits", "index_of", "integer", "narrow", "widen", "word"]
__all__ += ["add", "bit_and", "bit_or", "bit_xor", "multiply", "shift_left", "shift_right", "subtract"]

I32, FLOAT, DOUBLE = ir.IntType(32), ir.FloatType(), ir.DoubleType()
NUMBER = {"f32": np.float32, "f64": np.float64}


@inline
def sqrt(x: Any) -> Any:
    return math.sqrt(x)


@inline
def abs(x: Any) -> Any:  # noqa: A001
    return builtins.abs(x)


@inline
def maximum(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


@inline
def minimum(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


@inline
def where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


@inline
def divide(a: Any, b: Any) -> Any:
    return a / b


@inline
def power(x: Any, y: Any) -> Any:
    return _like(x, math.pow(np.float64(x), np.float64(y)))


@intrinsic  # type: ignore[untyped-decorator]
def _like(context: Any, x: Any, value: Any) -> Any:
    """``value``, a float64, in the dtype of ``x``."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return args[1] if x == types.float64 else b.fptrunc(args[1], FLOAT)

    return x(x, types.float64), emit


def _conversion(before: Any, after: Any, emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def convert(context: Any, x: Any) -> Any:
        return after(before), lambda context, b, signature, args: emit(b, args[0])

    return convert


bits_of_float = _conversion(types.float32, types.int32, lambda b, x: b.bitcast(x, I32))
float_of_bits = _conversion(types.int32, types.float32, lambda b, x: b.bitcast(x, FLOAT))
narrow = _conversion(types.float64, types.float32, lambda b, x: b.fptrunc(x, FLOAT))
widen = _conversion(types.float32, types.float64, lambda b, x: b.fpext(x, DOUBLE))
word = _conversion(types.int64, types.int32, lambda b, x: b.trunc(x, I32))
integer = np.int32


def _operation(method: str) -> Any:
    """An operation on two 32-bit integers, or conditions, which stays one: Numba's own operators make 64 bits of it."""

    @intrinsic  # type: ignore[untyped-decorator]
    def operate(context: Any, x: Any, y: Any) -> Any:
        return x(x, x), lambda context, b, signature, args: getattr(b, method)(*args)

    return operate


add, subtract, multiply = _operation("add"), _operation("sub"), _operation("mul")
bit_and, bit_or, bit_xor = _operation("and_"), _operation("or_"), _operation("xor")
shift_left, shift_right = _operation("shl"), _operation("ashr")


@inline
def index_of(i: Any, extent1: Any, extent2: Any, jump1: Any, jump2: Any, jump3: Any) -> Any:
    """See ``fusedadam.tensors.shards.IndexMap``."""
    rest = i % extent1
    return i // extent1 * jump1 + rest // extent2 * jump2 + rest % extent2 * jump3
