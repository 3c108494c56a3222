"""Generated source as modules, each named after its content.

Numba's own disk cache knows a function by its file and bytecode, not by the helpers and globals it uses, and so
hands out wrong code when the same rule is bound twice or a helper is edited. Here the source holds everything
that decides what is compiled, and the module's name is a hash of that and of what the backend says it is made for (for
Numba the versions and the processor; Triton keeps a cache of its own). Compiled code that is kept under this name
(numba_cache.py, in files of cache_files.py) cannot be stale or mixed up.

The source is written to a file as well, so that anyone can open the kernel that ran. Nothing reads that file: compilers
that ask for source by its path are given the text that is in memory.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import threading
from collections.abc import Iterable
from types import ModuleType

from fusedadam.generated import cache_files

_lock = threading.RLock()


def _new_lock() -> None:
    """A thread that held the lock does not exist in a forked child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def load(title: str, text: str, made_for: str) -> ModuleType:
    """The module with this source."""
    with _lock:
        return _load(title, text, made_for)


def _load(title: str, text: str, made_for: str) -> ModuleType:
    name = f"{title}_{hashlib.sha256((text + made_for).encode()).hexdigest()[:24]}"
    qualified = f"fusedadam.generated.kernels.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    path = str(cache_files.keep(f"{name}.py", text.encode()) or f"<{qualified}>")
    lines = text.splitlines(keepends=True)
    linecache.cache[path] = (len(text), None, lines, path)  # no time stamp, so the file is never read instead
    module = ModuleType(qualified)
    module.__file__ = path
    sys.modules[qualified] = module
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[qualified]
        raise
    return module


def indented(by: int, lines: Iterable[str]) -> list[str]:
    """Lines of source, so many spaces further in."""
    return [" " * by + line for line in lines]
