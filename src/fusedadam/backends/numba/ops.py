"""The words for Numba: scalar functions, and loads and stores as a few lines of LLVM each.

Numba knows neither bfloat16 nor float16 on a CPU, so both are read and written here as 16-bit integers.
Everything vectorises; ``run.inspect_asm()`` of a generated kernel shows it.
"""

from __future__ import annotations

import builtins
import math
import platform
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fusedadam.generated import numba_cache

__all__ = ["NUMBER", "abs", "add_up", "call_with_denormals", "divide", "find_largest", "inline", "kernel", "load"]
__all__ += ["maximum", "minimum", "power", "scratch", "sqrt", "store", "stored", "take", "where", "word"]

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
MEMORY = {"f32": FLOAT, "f64": DOUBLE, "f16": I16, "bf16": I16}
COMPUTE: dict[str, Any] = {"f32": types.float32, "f64": types.float64}
NUMBER = {"f32": np.float32, "f64": np.float64}

# Without the numpy error model every division carries a ZeroDivisionError branch, and nothing vectorises.
inline: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(error_model="numpy")


# A C function of one address, for any thread to call
kernel = numba_cache.cfunc("void(int64)", error_model="numpy")


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


@intrinsic  # type: ignore[untyped-decorator]
def take(context: Any, counter: Any, amount: Any) -> Any:
    """Adds to the int64 at an address, atomically, and gives what was there: how threads share out chunks."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def word(context: Any, address: Any, index: Any) -> Any:
    """The int64 at ``index`` of the memory at ``address``."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(b.gep(b.inttoptr(args[0], I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def call_with_denormals(context: Any, function: Any, argument: Any) -> Any:
    """Calls the C function at an address while this thread keeps denormal numbers, whatever its mode is otherwise.

    torch.set_flush_denormal(True) reaches some of the threads that kernels run on, and not others.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        before = _set_denormals(b, lambda mode, mask: b.and_(mode, mask))
        kind = ir.FunctionType(ir.VoidType(), [I64])
        b.call(b.inttoptr(args[0], kind.as_pointer()), [args[1]])
        if before is not None:
            _set_denormals(b, lambda mode, mask: before)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


def _set_denormals(b: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Changes the mode of floating-point arithmetic, and returns what it was; None on a processor of another kind."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        place = cgutils.alloca_once(b, I32)
        address = b.bitcast(place, pointer)
        b.call(b.module.declare_intrinsic("llvm.x86.sse.stmxcsr", [], kind), [address])
        before = b.load(place)
        b.store(change(before, I32(~0x8040 & 0xFFFFFFFF)), place)  # results, and operands, that are flushed to zero
        b.call(b.module.declare_intrinsic("llvm.x86.sse.ldmxcsr", [], kind), [address])
        return before
    if machine in ("aarch64", "arm64"):
        get, set_ = ir.FunctionType(I64, []), ir.FunctionType(ir.VoidType(), [I64])
        before = b.call(b.module.declare_intrinsic("llvm.aarch64.get.fpcr", [], get), [])
        changed = change(before, I64(~(1 << 24) & 0xFFFFFFFFFFFFFFFF))
        b.call(b.module.declare_intrinsic("llvm.aarch64.set.fpcr", [], set_), [changed])
        return before
    return None


def scratch(compute: str, length: int) -> Any:
    """Three functions: ``new()`` gives memory on the stack, which nothing else overlaps; ``get`` and ``put`` use it."""
    kind, pointer = COMPUTE[compute], types.CPointer(COMPUTE[compute])

    @intrinsic  # type: ignore[untyped-decorator]
    def new(context: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            # aligned for vectors, and of a length that keeps two of them from sharing the sets of a cache
            array = cgutils.alloca_once(b, ir.ArrayType(MEMORY[compute], length + 16))
            array.align = 64
            return b.bitcast(array, MEMORY[compute].as_pointer())

        return pointer(), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def get(context: Any, array: Any, index: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return b.load(b.gep(args[0], [args[1]]))

        return kind(pointer, types.int64), emit

    @intrinsic  # type: ignore[untyped-decorator]
    def put(context: Any, array: Any, index: Any, value: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            b.store(args[2], b.gep(args[0], [args[1]]))
            return context.get_dummy_value()

        return types.void(pointer, types.int64, kind), emit

    return new, get, put


def _adder(name: str, combine: Any) -> Any:
    """``add_up(array, first, count, lanes, get, put)``: in the order of fusedadam.rules.sums, in place.

    Each has a name of its own: what was compiled in different processes meets in one, by name, when it is loaded.
    """

    def add_up(array: Any, first: Any, count: Any, lanes: Any, get: Any, put: Any) -> Any:
        for begin in range(first + lanes, first + count, lanes):
            for j in range(min(lanes, first + count - begin)):
                put(array, first + j, combine(get(array, first + j), get(array, begin + j)))
        count = min(count, lanes)
        while count > 1:  # neighbours in pairs, and so on until one is left
            half = count // 2
            for j in range(half):
                put(array, first + j, combine(get(array, first + 2 * j), get(array, first + 2 * j + 1)))
            if count % 2:
                put(array, first + half, get(array, first + count - 1))
            count = half + count % 2
        return get(array, first)

    add_up.__name__ = add_up.__qualname__ = name
    return inline(add_up)


@inline
def _add(a: Any, b: Any) -> Any:
    return a + b


add_up, find_largest = _adder("add_up", _add), _adder("find_largest", maximum)


def load(storage: str, compute: str) -> Any:
    """``load(address, index)``: the value at ``index`` of memory kept as ``storage``, in the compute dtype."""

    @intrinsic  # type: ignore[untyped-decorator]
    def load_value(context: Any, address: Any, index: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return _widen(b, b.load(_element(b, storage, *args)), storage, compute)

        return COMPUTE[compute](types.int64, types.int64), emit

    return load_value


def store(storage: str, compute: str, any_nan: bool = True) -> Any:
    """``store(address, index, value)``: rounds once, to nearest even, and writes.

    Rounding to bfloat16 by integers could carry a NaN with a full mantissa over into zero. A kernel whose inputs are
    all bfloat16 never sees one (its NaNs end in 16 zero bits), so it may say ``any_nan=False`` and skip the test.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def store_value(context: Any, address: Any, index: Any, value: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            b.store(_narrow(b, args[2], storage, compute, any_nan), _element(b, storage, *args[:2]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, COMPUTE[compute]), emit

    return store_value


def stored(storage: str, compute: str, any_nan: bool = True) -> Any:
    """``stored(value)``: what comes back when it is stored and loaded."""

    @intrinsic  # type: ignore[untyped-decorator]
    def round_trip(context: Any, value: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return _widen(b, _narrow(b, args[0], storage, compute, any_nan), storage, compute)

        return COMPUTE[compute](COMPUTE[compute]), emit

    return round_trip


def _element(b: Any, storage: str, address: Any, index: Any) -> Any:
    return b.gep(b.inttoptr(address, MEMORY[storage].as_pointer()), [index])


def _widen(b: Any, raw: Any, storage: str, compute: str) -> Any:
    if storage == "f16":
        raw = b.fpext(b.bitcast(raw, HALF), FLOAT)
    elif storage == "bf16":
        raw = b.bitcast(b.shl(b.zext(raw, I32), I32(16)), FLOAT)
    if storage == "f64":
        return raw if compute == "f64" else b.fptrunc(raw, FLOAT)
    return raw if compute == "f32" else b.fpext(raw, DOUBLE)


def _narrow(b: Any, value: Any, storage: str, compute: str, any_nan: bool) -> Any:
    if storage in COMPUTE:
        if storage == compute:
            return value
        return b.fpext(value, DOUBLE) if storage == "f64" else b.fptrunc(value, FLOAT)
    if compute == "f64":
        value = _round_to_odd(b, value)
    if storage == "f16":
        return b.bitcast(b.fptrunc(value, HALF), I16)
    bits = b.bitcast(value, I32)
    odd = b.and_(b.lshr(bits, I32(16)), I32(1))
    rounded = b.lshr(b.add(b.add(bits, I32(0x7FFF)), odd), I32(16))
    if any_nan:
        rounded = b.select(b.fcmp_unordered("uno", value, value), I32(0x7FC0), rounded)
    return b.trunc(rounded, I16)


def _round_to_odd(b: Any, x: Any) -> Any:
    """float64 to float32 such that rounding once more, to 16 bits, is as good as rounding only once."""
    near = b.fptrunc(x, FLOAT)
    back, bits = b.fpext(near, DOUBLE), b.bitcast(near, I32)
    fabs = b.module.declare_intrinsic("llvm.fabs", [DOUBLE])
    too_small = b.fcmp_ordered("<", b.call(fabs, [back]), b.call(fabs, [x]))
    neighbour = b.select(too_small, b.add(bits, I32(1)), b.sub(bits, I32(1)))
    even = b.icmp_unsigned("==", b.and_(bits, I32(1)), I32(0))
    move = b.and_(even, b.fcmp_ordered("!=", back, x))
    return b.bitcast(b.select(move, neighbour, bits), FLOAT)
