"""Triton's hash of itself, which takes half a second to compute, kept from one process to the next.

Triton's cache knows a kernel by its source and by a hash of all of Triton: every process that launches a kernel reads
half a gigabyte of compiler first, even if all of its kernels are cached. Here that hash is kept in our own cache, under
the sizes and modification times of the files that it is computed from. Triton gets the value that it would have
computed, so its cache is the same with and without this. A Triton that has no such function is left as it is.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from fusedadam.codegen import cache_files

MODULES = ("triton.runtime.cache", "triton.compiler.compiler")  # where versions of Triton have had the function
FUNCTION = "triton_key"
FOLDERS = ("_C", "backends", "compiler", "language", "runtime")  # of the files that the hash is computed from
SUFFIXES = (".py", ".so", ".pyd", ".dylib")


@functools.cache
def recall() -> None:
    """Spares Triton the computation if the hash is known from an earlier process; else keeps it for the next one."""
    module = next((m for m in map(importlib.import_module, MODULES) if hasattr(m, FUNCTION)), None)
    if module is None:
        return
    compute = getattr(module, FUNCTION)
    if not hasattr(compute, "cache_info") or compute.cache_info().currsize:  # unknown to us, or computed already
        return
    name = f"triton_{_files_of(Path(str(importlib.import_module('triton').__file__)).parent)}{cache_files.SUFFIX}"
    payload = next(cache_files.load(name), None)
    if payload is None:
        cache_files.save(name, compute().encode())
    else:
        setattr(module, FUNCTION, functools.cache(payload.decode))


def _files_of(folder: Path) -> str:
    """A hash that changes when Triton is installed or edited."""
    listed = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(folder)]
    return hashlib.sha256(f"{cache_files.FORMAT!r} {sorted(listed)}".encode()).hexdigest()[:24]


def _files(folder: Path) -> Iterator[Path]:
    for name in FOLDERS:
        for here, _, files in os.walk(folder / name):
            yield from (Path(here, file) for file in files if file.endswith(SUFFIXES))
