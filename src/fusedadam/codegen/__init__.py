"""Generated source as modules, each named after its content.

Numba's own disk cache identifies a function by its file and bytecode, not by the helpers and globals it uses, so it
returns wrong code when the same rule is bound twice or a helper is edited. Here the source contains everything that
determines the compiled code, and the module's name is a hash of the source and of ``made_for``, a text from the backend
(for Numba: versions, processor and settings; Triton has a cache of its own). Compiled code is cached under that name
(cache_files.py), so it is never stale and never mixed up. It is linked without Numba (object_code.py); only where it is
missing is the module executed, and its functions compiled (numba_cache.py), those of several modules side by side
(side_by_side.py).

The source is also written to a file, where you can read the kernel that ran. Nothing is compiled from this file:
compilers that ask for the source get the text in memory, through linecache.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import os
import sys
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

from fusedadam.codegen import cache_files, object_code, side_by_side

_lock = threading.RLock()


class Function(NamedTuple):
    """A compiled function: where its code is in memory, the path of its source, and whether another process had
    compiled it."""

    address: int
    source: str
    was_cached: bool


functions: dict[str, Function] = {}  # by the names of their files


def _new_lock() -> None:
    """In a forked child, the thread that held the lock does not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def load(title: str, text: str, made_for: str) -> ModuleType:
    """The module with this source; ``title`` begins its name."""
    name = _name(title, text, made_for)
    qualified = _qualified(name)
    with _lock:
        if qualified in sys.modules:
            return sys.modules[qualified]
        path = _keep(name, text)
        lines = text.splitlines(keepends=True)
        linecache.cache[path] = (len(text), None, lines, path)  # no modification time: the file is never reread
        module = ModuleType(qualified)
        module.__file__ = path
        sys.modules[qualified] = module
        try:
            exec(compile(text, path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[qualified]
            raise
        return module


def function(title: str, text: str, made_for: str, name: str = "run") -> Function:
    """A function that Numba compiles, of the module with this source; cached, or compiled if it is not."""
    with _lock:
        return _function(title, text, made_for, name)


def compile_missing(sources: Iterable[tuple[str, str]], made_for: str) -> None:
    """Compiles what is not cached, side by side if there are idle cores. Whatever fails is left to ``function``."""
    missing = [source for source in dict.fromkeys(sources) if not _is_cached(_name(*source, made_for))]
    is_possible = side_by_side.python_can_be_started() and cache_files.cache_folder() is not None
    if len(missing) > 1 and is_possible and side_by_side.idle_cores() > 1:
        with _lock, contextlib.suppress(OSError), side_by_side.compiling(missing[1:], made_for):
            _function(*missing[0], made_for)


def _is_cached(module: str) -> bool:
    file = cache_files.name_of(module, "run")
    return file in functions or any(True for _ in cache_files.load(file))


def _function(title: str, text: str, made_for: str, name: str = "run") -> Function:
    module = _name(title, text, made_for)
    file = cache_files.name_of(module, name)
    if file not in functions:
        found = None if _qualified(module) in sys.modules else _cached(file, module, text)
        if found is None:
            with cache_files.alone_with(module) as has_waited:
                found = _cached(file, module, text) if has_waited else None
                found = found or _compiled(load(title, text, made_for), name)
        functions[file] = found
    return functions[file]


def _cached(file: str, module: str, text: str) -> Function | None:
    address = object_code.load(file)
    return None if address is None else Function(address, _keep(module, text), was_cached=True)


def _compiled(module: ModuleType, name: str) -> Function:
    from fusedadam.codegen import numba_cache  # imports Numba, as the module has done

    compiled = getattr(module, name)
    return Function(numba_cache.address_of(compiled), str(module.__file__), numba_cache.was_cached(compiled))


def _name(title: str, text: str, made_for: str) -> str:
    return f"{title}_{hashlib.sha256((text + made_for).encode()).hexdigest()[:24]}"


def _qualified(name: str) -> str:
    return f"fusedadam.codegen.kernels.{name}"


def _keep(name: str, text: str) -> str:
    """The path of the source, for a reader; if it cannot be written, a placeholder in angle brackets."""
    return str(cache_files.keep(f"{name}.py", text.encode()) or f"<{_qualified(name)}>")


def indented(by: int, lines: Iterable[str]) -> list[str]:
    """Lines of source, indented by this many more spaces."""
    return [" " * by + line for line in lines]
