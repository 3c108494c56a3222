"""Kernels that are not cached, compiled side by side in processes of their own.

Numba compiles one function at a time: it holds a lock, and the GIL, nearly all the while. So other processes fill the
cache, and this one then finds the kernels there. What they do not compile, for whatever reason, is compiled here, so an
error is raised here, as if there were no other processes. They import Numba and not torch, and start as new processes:
a fork of a process that trains may deadlock, or spoil memory that is registered with a network.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fusedadam import machine
from fusedadam.codegen import object_code

PATIENCE = 60.0  # seconds that the other processes get when this one has compiled its own: a kernel takes a few
# the packages whose __init__ is not executed: it imports torch
PROGRAM = """
import json, sys, types
package, made_for, numba_made_for, sources = json.load(sys.stdin)
for name in ("fusedadam", "fusedadam.backends", "fusedadam.backends.numba"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [package + name.removeprefix("fusedadam").replace(".", "/")]
from fusedadam import codegen
from fusedadam.codegen import numba_cache
if numba_cache.made_for() == numba_made_for:  # the settings may have been changed in the process that asks
    for title, text in sources:
        codegen.function(title, text, made_for)
"""


@contextlib.contextmanager
def compiling(sources: Sequence[tuple[str, str]], made_for: str) -> Iterator[None]:
    """While the block runs, other processes compile these sources (titles and texts); it ends when they have ended."""
    count = min(len(sources), idle_cores() - 1)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for k in range(count):
            workers.append(_start(sources[k::count], made_for))
        yield
        end = time.monotonic() + PATIENCE
        with contextlib.suppress(subprocess.TimeoutExpired):
            for worker in workers:
                worker.wait(max(0.0, end - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()  # nothing, if it has ended
            worker.wait()


def python_can_be_started() -> bool:
    """In a program that PyInstaller or the like has made, ``sys.executable`` is that program: it would start again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def idle_cores() -> int:
    """This process's own among them. On cores that others use, more processes only take turns."""
    return machine.cores() - (round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0)


def _start(sources: Sequence[tuple[str, str]], made_for: str) -> subprocess.Popen[bytes]:
    asked = [str(Path(__file__).parent.parent), made_for, object_code.made_for(), list(sources)]
    with tempfile.TemporaryFile() as file:  # not a pipe: nobody waits for the other to read or write
        file.write(json.dumps(asked).encode())
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=file,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
