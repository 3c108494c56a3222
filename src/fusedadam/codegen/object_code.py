"""Compiled functions as object code, which llvmlite links into a process without Numba.

Numba takes half a second to import and to set up, and a process that finds its kernels in the cache needs nothing of
it. So the cache keeps the object code that Numba's compiler has made, and the name of a function in it; llvmlite, which
Numba is built on, links that in less than a millisecond. Only Numba knows what compiled code depends on, such as the
defaults of its settings: the cache keeps that text, too, under a hash of everything that the text follows from.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from fusedadam.codegen import cache_files

KIND = "object code"
SETTINGS = Path(".numba_config.yaml")  # Numba reads it, and environment variables of this prefix, when it is imported
PREFIX = "NUMBA_"
SVML = {"linux": "libsvml.so", "darwin": "libsvml.dylib", "win32": "svml_dispmd"}  # what Numba tries to load
_linked: list[Any] = []  # what has been linked stays until the process ends
_count = itertools.count()


@functools.cache
def made_for() -> str:
    """Everything but the source that determines the compiled code: versions, processor, Numba's settings."""
    if "numba" not in sys.modules:  # else its settings may have been changed since it was imported
        name = f"made_for_{hashlib.sha256(_known_without_numba().encode()).hexdigest()[:24]}{cache_files.SUFFIX}"
        for payload in cache_files.load(name):
            return payload.decode()
        from fusedadam.codegen import numba_cache

        cache_files.save(name, numba_cache.made_for().encode())
    from fusedadam.codegen import numba_cache

    return numba_cache.made_for()


def load(name: str) -> int | None:
    """The address of the function that is cached under this name; None if there is none, or none that can be linked."""
    for payload in cache_files.load(name):
        try:
            kind, *content = pickle.loads(payload)
            if kind == KIND:
                return link(*content)
        except Exception:  # an intact file of an incompatible build of the same version
            continue
    return None


def save(name: str, entry: str, code: bytes) -> None:
    cache_files.save(name, pickle.dumps((KIND, entry, code)))


def link(entry: str, code: bytes) -> int:
    """The address of function ``entry`` of an object file. Raises if it needs a symbol that this process does not have
    without Numba, such as a function of Numba's runtime."""
    import llvmlite.binding as llvm

    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(entry)
    library = builder.link(_linker(), f"fusedadam {next(_count)}")
    _linked.append(library)
    address: int = library[entry]
    return address


@functools.cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    _load_svml()
    return llvm.create_lljit_compiler(suppress_errors=True)


def _known_without_numba() -> str:
    """All that the result of ``made_for`` follows from."""
    import llvmlite
    import llvmlite.binding as llvm

    versions = f"{sys.version} numba {_version_of_numba()} llvmlite {llvmlite.__version__}"
    processor = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(PREFIX))
    settings = SETTINGS.read_bytes() if SETTINGS.is_file() else None
    return f"{versions} {cache_files.FORMAT!r} {processor} {variables} {settings!r} {_load_svml()}"


def _version_of_numba() -> str:
    try:
        return importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:  # it was not installed by a package manager
        import numba

        return str(numba.__version__)


@functools.cache
def _load_svml() -> bool:
    """Whether Intel's vector functions are there, which code that Numba compiles then calls."""
    import llvmlite.binding as llvm

    try:
        llvm.load_library_permanently(SVML[sys.platform])
    except (KeyError, RuntimeError):
        return False
    return True
