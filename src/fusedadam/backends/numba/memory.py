"""Memory for kernels, as a few lines of LLVM each: loads, stores, scratch memory on the stack, and sums of it.

Numba knows no float16 on a CPU, so it is read and written here as a 16-bit integer. Everything vectorizes;
``run.inspect_asm()`` of a generated kernel shows it.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fusedadam.backends.numba.calling import inline
from fusedadam.backends.numba.ops import integer, maximum, where

__all__ = ["add_up", "find_largest", "int64_at", "largest_word", "load", "scratch", "store", "stored"]

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
MEMORY = {"f32": FLOAT, "f64": DOUBLE, "f16": I16, "int8": I8, "uint8": I8, "int16": I16, "int32": I32, "int64": I64}
VALUES: dict[str, Any] = {"f32": types.float32, "f64": types.float64, "int32": types.int32, "int64": types.int64}
VECTOR = 256  # lanes that are added up as one vector


@functools.cache
def load(kind: str, value: str) -> Any:
    """``load(address, index)``: what is at ``index`` of memory of this kind, as a value of that type."""

    @intrinsic  # type: ignore[untyped-decorator]
    def load_value(context: Any, address: Any, index: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return _extended(b, b.load(_element(b, kind, *args)), kind, value)

        return VALUES[value](types.int64, types.int64), emit

    return load_value


@functools.cache
def store(kind: str, value: str) -> Any:
    """``store(address, index, x)``: floats are rounded to nearest even, integers cut off."""

    @intrinsic  # type: ignore[untyped-decorator]
    def store_value(context: Any, address: Any, index: Any, x: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            b.store(_shortened(b, args[2], kind, value), _element(b, kind, *args[:2]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, VALUES[value]), emit

    return store_value


@functools.cache
def stored(kind: str, value: str, result: str) -> Any:
    """``stored(x)``: what comes back when it is stored and loaded."""

    @intrinsic  # type: ignore[untyped-decorator]
    def round_trip(context: Any, x: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return _extended(b, _shortened(b, args[0], kind, value), kind, result)

        return VALUES[result](VALUES[value]), emit

    return round_trip


def _element(b: Any, kind: str, address: Any, index: Any) -> Any:
    return b.gep(b.inttoptr(address, MEMORY[kind].as_pointer()), [index])


def _extended(b: Any, raw: Any, kind: str, value: str) -> Any:
    if value == "int32":
        return raw if kind == "int32" else b.zext(raw, I32) if kind == "uint8" else b.sext(raw, I32)
    if kind == "f16":
        raw, kind = b.fpext(b.bitcast(raw, HALF), FLOAT), "f32"
    return _as_float(b, raw, kind, value)


def _shortened(b: Any, x: Any, kind: str, value: str) -> Any:
    if value == "int32":
        return x if kind == "int32" else b.trunc(x, MEMORY[kind])
    if kind == "f16":
        return b.bitcast(b.fptrunc(x, HALF), I16)
    return _as_float(b, x, value, kind)


def _as_float(b: Any, x: Any, before: str, after: str) -> Any:
    return x if before == after else b.fpext(x, DOUBLE) if after == "f64" else b.fptrunc(x, FLOAT)


int64_at = load("int64", "int64")


@functools.cache
def scratch(compute: str, length: int) -> Any:
    """Three functions: ``new()`` gives memory on the stack, which nothing else overlaps; ``get`` and ``put`` use it."""
    kind, pointer = VALUES[compute], types.CPointer(VALUES[compute])

    @intrinsic  # type: ignore[untyped-decorator]
    def new(context: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            # aligned for vectors, longer by one, and of a length that keeps two from sharing the sets of a cache
            array = cgutils.alloca_once(b, ir.ArrayType(MEMORY[compute], length + VECTOR + 16))
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


def _pairs(lanes: int, largest: bool) -> Any:
    """``fold(array, first, count)``: up to ``lanes`` terms, neighbours in pairs, and so on until one is left.

    Written as vectors: as a loop it stays scalar, and takes as long as the update of a thousand elements. It loads
    all lanes, and takes those without a term for 0, which changes nothing.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def fold(context: Any, array: Any, first: Any, count: Any) -> Any:
        def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
            element = FLOAT if array.dtype == types.float32 else DOUBLE
            words = ir.VectorType(I32, lanes)
            place = b.bitcast(b.gep(args[0], [args[1]]), ir.VectorType(element, lanes).as_pointer())
            x = b.load(place, align=4 if element is FLOAT else 8)  # of one element: rows begin anywhere
            limit = b.insert_element(ir.Constant(words, ir.Undefined), b.trunc(args[2], I32), I32(0))
            limit = b.shuffle_vector(limit, limit, ir.Constant(words, [0] * lanes))
            is_term = b.icmp_signed("<", ir.Constant(words, list(range(lanes))), limit)
            x = b.select(is_term, x, ir.Constant(x.type, [0.0] * lanes))
            left = lanes // 2
            while left:
                even, odd = (
                    b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, left), list(range(k, 2 * left, 2))))
                    for k in (0, 1)
                )
                x = _larger(b, even, odd) if largest else b.fadd(even, odd)
                left //= 2
            return b.extract_element(x, I32(0))

        return array.dtype(array, types.int64, types.int64), emit

    return fold


def _larger(b: Any, x: Any, y: Any) -> Any:
    """As ``maximum``."""
    return b.select(b.or_(b.fcmp_ordered(">", x, y), b.fcmp_unordered("uno", x, x)), x, y)


def _adder(name: str, combine: Any, largest: bool) -> Any:
    """``add_up(array, first, count, lanes, get, put)``: in the order of fusedadam.rules.sums, in place.

    Each has a name of its own: what was compiled in different processes meets in one, by name, when it is loaded.
    """
    few, some, many = (_pairs(lanes, largest) for lanes in (16, 64, VECTOR))

    def add_up(array: Any, first: Any, count: Any, lanes: Any, get: Any, put: Any) -> Any:
        for begin in range(first + lanes, first + count, lanes):
            for j in range(min(lanes, first + count - begin)):
                put(array, first + j, combine(get(array, first + j), get(array, begin + j)))
        count = min(count, lanes)
        while count > VECTOR:
            half = count // 2
            for j in range(half):
                put(array, first + j, combine(get(array, first + 2 * j), get(array, first + 2 * j + 1)))
            if count % 2:
                put(array, first + half, get(array, first + count - 1))
            count = half + count % 2
        if count == 1:
            return get(array, first)
        if count <= 16:
            return few(array, first, count)
        if count <= 64:
            return some(array, first, count)
        return many(array, first, count)

    add_up.__name__ = add_up.__qualname__ = name
    return inline(add_up)


@inline
def _add(a: Any, b: Any) -> Any:
    return a + b


add_up, find_largest = _adder("add_up", _add, largest=False), _adder("find_largest", maximum, largest=True)


@inline
def largest_word(array: Any, first: Any, count: Any, get: Any) -> Any:
    """The largest of some words in scratch memory, none of which is negative."""
    largest = integer(0)
    for j in range(first, first + count):
        largest = where(get(array, j) > largest, get(array, j), largest)
    return largest
