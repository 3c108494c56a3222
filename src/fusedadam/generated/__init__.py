"""Generated source as modules, each named after its content.

Numba's own disk cache identifies a function by its file and bytecode, not by the helpers and globals it uses, so it
returns wrong code when the same rule is bound twice or a helper is edited. Here the source contains everything that
determines the compiled code, and the module's name is a hash of the source and of ``made_for``, a text from the backend
(for Numba: versions, processor and settings; Triton has a cache of its own). Compiled code is cached under that name
(cache_files.py, numba_cache.py), so it is never stale and never mixed up.

The source is also written to a file, where you can read the kernel that ran. Nothing reads this file: compilers that
ask for the source get the text in memory, through linecache.
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
    """In a forked child, the thread that held the lock does not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def load(title: str, text: str, made_for: str) -> ModuleType:
    """The module with this source; ``title`` begins its name."""
    with _lock:
        return _load(title, text, made_for)


def _load(title: str, text: str, made_for: str) -> ModuleType:
    name = f"{title}_{hashlib.sha256((text + made_for).encode()).hexdigest()[:24]}"
    qualified = f"fusedadam.generated.kernels.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    path = str(cache_files.keep(f"{name}.py", text.encode()) or f"<{qualified}>")
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


def indented(by: int, lines: Iterable[str]) -> list[str]:
    """Lines of source, indented by this many more spaces."""
    return [" " * by + line for line in lines]
