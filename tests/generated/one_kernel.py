"""One small kernel, which adds to the number at an address, loaded or compiled as if by a new process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fusedadam import generated
from fusedadam.generated import cache_files, numba_cache

KERNEL = """
from fusedadam.backends.numba.ops import *

get, put = load("f64", "f64"), store("f64", "f64")


@kernel
def run(_words):
    put(_words, 0, get(_words, 0) + {amount}.0)
"""


def fresh(amount: int = 1, made_for: str = "") -> ModuleType:
    """The kernel, loaded or compiled as if by a new process; it computes the right thing in any case."""
    for name in [name for name in sys.modules if name.startswith("fusedadam.generated.kernels.faults_")]:
        del sys.modules[name]
    module = generated.load("faults", KERNEL.format(amount=amount), numba_cache.made_for() + made_for)
    number = np.array([2.0])
    module.run.ctypes(number.ctypes.data)
    assert number[0] == 2 + amount
    return module


def hit(**which: Any) -> bool:
    return bool(fresh(**which).run.cache_hits)


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("faults_*" + cache_files.SUFFIX)
    return path
