"""Numba's compiler, with our own cache for compiled code.

Numba's cache trusts its files: if one is truncated, every later process fails in Numba's loader, and if one cannot be
written, the compilation fails. Here a damaged file is compiled again, and a write may fail (cache_files.py). There is
no index: the name of a module identifies what is compiled (``codegen/__init__.py``), and a function's file is named
after its module. The file holds object code (object_code.py). Where that cannot be linked without Numba, because it
calls Numba's runtime, the file holds what Numba's own cache would keep.

This relies on interfaces of Numba's cache that have not changed for many releases: the attribute ``_cache`` of compiled
functions, with ``load_overload`` and ``save_overload``, ``serialize_using_object_code`` of their libraries, and
``_reduce`` and ``_rebuild`` of ``CompileResult``.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite
import numba
from numba.core import serialize, sigutils
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

from fusedadam.codegen import cache_files, object_code

KIND = "Numba's"
# Settings of Numba that change the generated code, apart from the processor's, which magic_tuple() includes
SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT", "BOUNDSCHECK", "USING_SVML")
# what makes a function callable from Python and from C: code that nothing of ours needs, and that calls Numba's runtime
NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@functools.cache
def made_for() -> str:
    """Everything but the source that determines the compiled code: versions, processor, Numba's settings."""
    versions = f"{sys.version} numba {numba.__version__} llvmlite {llvmlite.__version__} {cache_files.FORMAT!r}"
    processor = cpu_target.target_context.codegen().magic_tuple()
    settings = {name: str(getattr(numba.config, name, None)) for name in SETTINGS}
    return f"{versions} {processor} {settings}"


# Without the numpy error model every division carries a ZeroDivisionError branch, and nothing vectorizes.
inline: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(error_model="numpy", **NO_WRAPPERS)


def function(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function for this signature. It is called as Numba's functions call each other: see ``call``."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**options, **NO_WRAPPERS)(function)
        compiled._cache = DiskCache(function, "llvm_func_name")
        compiled.compile(signature)
        compiled.disable_compile()
        return compiled

    return decorate


def cfunc(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a C function, which any thread can call.

    Numba adds code that prints exceptions. Only if the compiler sees that there are none, as in a function of a line or
    two, is that code left out, and the function can be linked without Numba.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        compiled: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
        compiled._cache = DiskCache(function, "llvm_cfunc_wrapper_name")
        compiled.compile()
        return compiled

    return decorate


def call(context: Any, b: Any, address: Any, result: Any, types: Sequence[Any], values: Sequence[Any]) -> Any:
    """Emits a call of what ``function`` has compiled, by its address. None of ours raises, so its status is ignored."""
    kind = context.call_conv.get_function_type(result, types)
    _, value = context.call_conv.call_function(b, b.inttoptr(address, kind.as_pointer()), result, types, values)
    return value


def address_of(compiled: Any) -> int:
    """Where the code of a function is that was compiled by one of the decorators."""
    if isinstance(compiled, CFunc):
        return int(compiled.address or 0)
    (result,) = compiled.overloads.values()
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


def was_cached(compiled: Any) -> bool:
    return bool(compiled.cache_hits if isinstance(compiled, CFunc) else compiled.stats.cache_hits)


class DiskCache(NullCache):  # type: ignore[misc]
    """Numba's cache interface for one function with one signature. ``entry``: which of its symbols is called."""

    def __init__(self, function: Callable[..., Any], entry: str) -> None:
        self.name = cache_files.name_of(function.__module__.rpartition(".")[2], function.__name__)
        self.entry = entry

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        for payload in cache_files.load(self.name):
            with contextlib.suppress(Exception):  # an intact file from an incompatible build of the same Numba version
                kind, content = pickle.loads(payload)
                if kind == KIND:
                    return CompileResult._rebuild(target_context, *pickle.loads(content))
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals:  # the code contains addresses of this process
            return
        try:
            _, _, (code, _) = result.library.serialize_using_object_code()
            entry = getattr(result.fndesc, self.entry)
            object_code.link(entry, code)
        except Exception:
            cache_files.save(self.name, pickle.dumps((KIND, serialize.dumps(result._reduce()))))
        else:
            object_code.save(self.name, entry, code)
