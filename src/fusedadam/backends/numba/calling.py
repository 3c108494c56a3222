"""How a kernel is compiled and called: decorators, the mode of a thread, and how threads share out chunks."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fusedadam.codegen import numba_cache
from fusedadam.codegen.numba_cache import inline

__all__ = ["c_function", "call_with_denormals", "inline", "kernel", "prefer_wide_vectors", "take"]

I32, I64 = ir.IntType(32), ir.IntType(64)

# A function of one address, for call_with_denormals to call, and a C function of one address, for any thread to call
kernel = numba_cache.function("void(int64)", error_model="numpy")
c_function = numba_cache.cfunc("void(int64)", error_model="numpy")


@intrinsic  # type: ignore[untyped-decorator]
def take(context: Any, counter: Any, amount: Any) -> Any:
    """Adds to the int64 at an address, atomically, and gives what was there: how threads share out chunks."""

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic")

    return types.int64(types.int64, types.int64), emit


@intrinsic  # type: ignore[untyped-decorator]
def call_with_denormals(context: Any, function: Any, argument: Any) -> Any:
    """Calls the kernel at an address while this thread keeps denormal numbers, whatever its mode is otherwise.

    torch.set_flush_denormal(True) reaches some of the threads that kernels run on, and not others.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        before = _set_denormals(b, lambda mode, mask: b.and_(mode, mask))
        numba_cache.call(context, b, args[0], types.void, [types.int64], [args[1]])
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


@intrinsic  # type: ignore[untyped-decorator]
def prefer_wide_vectors(context: Any) -> Any:
    """Compiles this kernel with vectors of 64 bytes, where the processor has them.

    LLVM prefers half of that, since some processors run slower with 64. For kernels that only wait for memory it does
    not matter; hashes and codecs keep a processor busy.
    """

    def emit(context: Any, b: Any, signature: Any, args: Any) -> Any:
        # llvmlite knows only the names of attributes without a value
        set.add(b.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), emit
