"""Generated source as modules: each lives in a file that is named after its content.

Numba's own disk cache knows a function by its file and bytecode, not by the helpers and globals it uses, and so
hands out wrong code when the same rule is bound twice or a helper is edited. Here the file holds everything
that decides what is compiled, its name is a hash of that and of what the backend says it is made for (for Numba the
versions and the processor; Triton keeps a cache of its own), and it never changes once written. Numba's cache, which
sits beside the file, then cannot be stale or mixed up, and anyone can open the kernel that ran.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
import os
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

VARIABLE = "FUSEDADAM_CACHE_DIR"
_lock = threading.RLock()


def _new_lock() -> None:
    """A thread that held the lock does not exist in a forked child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def load(title: str, text: str, made_for: str) -> ModuleType:
    """The module with this source, from disk if it is there. ``cached`` in its globals says whether it has a file."""
    with _lock:
        return _load(title, text, made_for)


def _load(title: str, text: str, made_for: str) -> ModuleType:
    name = f"{title}_{hashlib.sha256((text + made_for).encode()).hexdigest()[:24]}"
    qualified = f"fusedadam.generated.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    folder = cache_folder()
    path = f"<{qualified}>" if folder is None else str(_write_once(folder / f"{name}.py", text))
    if folder is None:
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = ModuleType(qualified)
    module.__file__ = path
    module.__dict__["cached"] = folder is not None
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


@functools.cache
def cache_folder() -> Path | None:
    """Where compiled code is kept: the first folder of ours that can be written to."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        if not _usable(Path(chosen)):
            raise RuntimeError(f"{VARIABLE}={chosen!r} must be a folder of your own, which others cannot write to")
        return Path(chosen)
    for folder in _candidates():
        if _usable(folder):
            return folder
    warnings.warn(
        f"fusedadam found no folder to keep compiled code in, so every process compiles anew; set {VARIABLE} to one",
        stacklevel=2,
    )
    return None


def _candidates() -> Iterator[Path]:
    if os.environ.get("XDG_CACHE_HOME"):
        yield Path(os.environ["XDG_CACHE_HOME"]) / "fusedadam"
    with contextlib.suppress(RuntimeError):  # no home
        yield Path.home() / ".cache" / "fusedadam"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    with contextlib.suppress(FileNotFoundError):  # no temporary folder either
        yield Path(tempfile.gettempdir()) / f"fusedadam-{user}"


def _usable(folder: Path) -> bool:
    """Writable, and nobody else's: machine code is loaded from here."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH):
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _write_once(path: Path, text: str) -> Path:
    """Of several processes that write the same file, the first wins: its time stamp is part of Numba's key."""
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(text)
        try:
            os.link(file.name, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            os.replace(file.name, path)
            return path
        os.unlink(file.name)
    return path
