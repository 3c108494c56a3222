"""``numba.njit`` and ``numba.cfunc``, with compiled code kept in files of our own.

Numba's own cache trusts its files: once one is truncated, every later process fails inside Numba's loader, and a file
that cannot be written makes the compilation fail. Here a damaged file is compiled anew, and a write may fail
(cache_files.py). There is no index: a module is named after everything that decides what is compiled (generated.py),
and a function's file is named after its module.

This relies on what Numba's own cache uses, which has not changed for many releases: the attribute ``_cache`` of
compiled functions, with ``load_overload`` and ``save_overload``, and ``_reduce`` and ``_rebuild`` of ``CompileResult``.
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

# Settings of Numba that change the code it generates; those for the processor are part of its description
SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT", "BOUNDSCHECK", "USING_SVML")


@functools.cache
def made_for() -> str:
    """What decides how source is compiled, besides the source: versions, processor, Numba's settings."""
    versions = f"{sys.version} numba {numba.__version__} llvmlite {llvmlite.__version__} {cache_files.FORMAT!r}"
    processor = cpu_target.target_context.codegen().magic_tuple()
    settings = {name: str(getattr(numba.config, name, None)) for name in SETTINGS}
    return f"{versions} {processor} {settings}"


def njit(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """For Python to call, with arguments of these types only."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(**options)(function)
        compiled._cache = DiskCache(function)
        compiled.compile(signature)
        compiled.disable_compile()
        return compiled

    return decorate


def cfunc(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A C function, for any thread to call."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled: Any = CFunc(function, sigutils.normalize_signature(signature), locals={}, options=options)
        compiled._cache = DiskCache(function)
        compiled.compile()
        return compiled

    return decorate


class DiskCache(NullCache):  # type: ignore[misc]
    """The compiled code of one function, which has one signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}{cache_files.SUFFIX}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        for payload in cache_files.load(self.name):
            try:
                return CompileResult._rebuild(target_context, *pickle.loads(payload))
            except Exception:  # intact, yet from an incompatible build of Numba under the same version number
                continue
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if not result.library.has_dynamic_globals:  # such code holds addresses of this process
            cache_files.save(self.name, serialize.dumps(result._reduce()))
