"""``numba.njit`` and ``numba.cfunc`` with our own cache for compiled code.

Numba's cache trusts its files: if one is truncated, every later process fails in Numba's loader, and if one cannot be
written, the compilation fails. Here a damaged file is compiled again, and a write may fail (cache_files.py). There is
no index: the name of a module identifies what is compiled (``generated/__init__.py``), and a function's file is named
after its module.

This relies on interfaces of Numba's cache that have not changed for many releases: the attribute ``_cache`` of compiled
functions, with ``load_overload`` and ``save_overload``, and ``_reduce`` and ``_rebuild`` of ``CompileResult``.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import llvmlite
import numba
from numba.core import serialize, sigutils
from numba.core.caching import NullCache
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

from fusedadam.generated import cache_files

# Settings of Numba that change the generated code, apart from the processor's, which magic_tuple() includes
SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT", "BOUNDSCHECK", "USING_SVML")


@functools.cache
def made_for() -> str:
    """Everything but the source that determines the compiled code: versions, processor, Numba's settings."""
    versions = f"{sys.version} numba {numba.__version__} llvmlite {llvmlite.__version__} {cache_files.FORMAT!r}"
    processor = cpu_target.target_context.codegen().magic_tuple()
    settings = {name: str(getattr(numba.config, name, None)) for name in SETTINGS}
    return f"{versions} {processor} {settings}"


def njit(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function that Python calls, for this signature only."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**options)(function)
        compiled._cache = DiskCache(function)
        compiled.compile(signature)
        compiled.disable_compile()
        return compiled

    return decorate


def cfunc(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a C function, which any thread can call."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
        compiled._cache = DiskCache(function)
        compiled.compile()
        return compiled

    return decorate


class DiskCache(NullCache):  # type: ignore[misc]
    """Numba's cache interface for one function with one signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}{cache_files.SUFFIX}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        for payload in cache_files.load(self.name):
            try:
                return CompileResult._rebuild(target_context, *pickle.loads(payload))
            except Exception:  # an intact file from an incompatible build of the same Numba version
                continue
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if not result.library.has_dynamic_globals:  # else the code contains addresses of this process
            cache_files.save(self.name, serialize.dumps(result._reduce()))
