"""One small kernel, which adds to the number at an address, loaded or compiled as if by a new process."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fusedadam import codegen
from fusedadam.codegen import Function, cache_files, numba_cache

KERNEL = """
from fusedadam.backends.numba.calling import *
from fusedadam.backends.numba.memory import *

get, put = load("f64", "f64"), store("f64", "f64")


@c_function
def run(_words):
    put(_words, 0, get(_words, 0) + {amount}.0)
"""


def fresh(amount: int = 1, made_for: str = "", text: str = KERNEL) -> Function:
    """The kernel, loaded or compiled as if by a new process; it computes the right thing in any case."""
    forget()
    function = codegen.function("faults", text.format(amount=amount), numba_cache.made_for() + made_for)
    number = np.array([2.0])
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(function.address)(number.ctypes.data)
    assert number[0] == 2 + amount
    return function


def executed() -> ModuleType:
    """The module of the kernel, as it is executed where nothing is cached."""
    forget()
    return codegen.load("faults", KERNEL.format(amount=1), numba_cache.made_for())


def forget(kernel: str = "faults") -> None:
    for name in [name for name in sys.modules if name.startswith(f"fusedadam.codegen.kernels.{kernel}_")]:
        del sys.modules[name]
    for name in [name for name in codegen.functions if name.startswith(f"{kernel}_")]:
        del codegen.functions[name]


def hit(**which: Any) -> bool:
    return fresh(**which).was_cached


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("faults_*" + cache_files.SUFFIX)
    return path
