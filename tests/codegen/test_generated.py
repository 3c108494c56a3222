"""Compiled code on disk: never stale, never mixed up, found again by a second process, and possible without a disk."""

from __future__ import annotations

import importlib
import linecache
import os
import sys

import pytest
import torch

from fusedadam import codegen
from fusedadam.backends import numba
from fusedadam.codegen import cache_files
from tests.codegen.one_kernel import forget
from tests.support import run_program

PROGRAM = """
import torch, fusedadam
from fusedadam import codegen
param = torch.nn.Parameter(torch.ones(5))
param.grad = torch.ones(5)
optimizer = fusedadam.AdamW([param], lr=0.1, maximize={maximize})
optimizer.step()
kernels = [function for name, function in codegen.functions.items() if name.startswith("numba_adam")]
print(param[0].item(), sum(kernel.was_cached for kernel in kernels))
"""

HELPER = """
from fusedadam.contract.base import FusedOptimizer
from fusedadam.rules.rule import Value, Values, Scalar, rule

def helper(x):
    return x * {factor}

@rule(scalars=lambda step, lr: {{"lr": lr}})
def helped(param: Value, grad: Value, *, lr: Scalar) -> Values:
    param = param - lr * helper(grad)
    return param

class SGD(FusedOptimizer):
    rule = helped
    states = {{}}
    def __init__(self, params, lr=0.5):
        super().__init__(params, lr=lr)
"""


def run(program, cache):
    done = run_program(program, FUSEDADAM_CACHE_DIR=str(cache))
    return done.stdout.split(), done.stderr


def test_a_second_process_finds_it_and_other_flags_do_not_mix(tmp_path):
    """Numba's own cache, keyed by bytecode, gave the first binding's code for the second."""
    (down, hits), _ = run(PROGRAM.format(maximize=False), tmp_path)
    assert int(hits) == 0
    (up, hits), _ = run(PROGRAM.format(maximize=True), tmp_path)
    assert int(hits) == 0
    assert float(down) < 1 < float(up)
    files = sorted(p.name for p in tmp_path.rglob("*"))
    (again, hits), _ = run(PROGRAM.format(maximize=False), tmp_path)
    assert (again, int(hits)) == (down, 1)
    assert files == sorted(p.name for p in tmp_path.rglob("*"))
    assert not [name for name in files if name.endswith(".tmp")]


def test_an_edited_helper_is_compiled_anew(folder, tmp_path, monkeypatch):
    """Numba's own cache looks at the file of the kernel, not at that of its helpers."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for factor, was_cached in ((1.0, False), (4.0, False), (1.0, True)):
        (tmp_path / "helped.py").write_text(HELPER.format(factor=factor))
        forget("numba_helped")  # as in a new process
        numba._compile.cache_clear()
        linecache.checkcache()
        sys.modules.pop("helped", None)
        param = torch.nn.Parameter(torch.zeros(3))
        param.grad = torch.ones(3)
        importlib.import_module("helped").SGD([param]).step()
        assert param[0].item() == -0.5 * factor
        (kernel,) = (function for name, function in codegen.functions.items() if name.startswith("numba_helped"))
        assert kernel.was_cached is was_cached
    sys.modules.pop("helped")


def test_without_any_folder_to_write_to_it_works_and_says_so(tmp_path):
    """A read-only home and no temporary folder: compiled in memory, with one warning."""
    no_folder = "from fusedadam.codegen import cache_files; cache_files._candidates = lambda: []"
    program = no_folder + PROGRAM.format(maximize=False)
    (value, _), complaint = run(program, "")
    assert float(value) < 1
    assert complaint.count("set FUSEDADAM_CACHE_DIR") == 1


def test_a_folder_that_was_asked_for_and_cannot_be_had_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDADAM_CACHE_DIR", str(tmp_path / "file" / "below"))
    cache_files.folders.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="a folder of your own"):
            cache_files.cache_folder()
    finally:
        cache_files.folders.cache_clear()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="POSIX permissions")
def test_code_is_not_loaded_from_a_folder_that_others_can_write(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert not cache_files._is_usable(shared)
    assert cache_files._is_usable(tmp_path / "own")


def test_an_error_in_generated_source_leaves_no_half_module(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_files, "folders", lambda: (tmp_path,))
    with pytest.raises(ZeroDivisionError):
        codegen.load("broken", "1 / 0", "")
    assert not [name for name in sys.modules if name.startswith("fusedadam.codegen.kernels.broken")]


def test_functions_that_kernels_call_have_names_of_their_own():
    """Numba links what it loads by name and a number that each process counts from 1.

    Two functions made by one factory had the same name: compiled in two processes, and loaded from the cache into a
    third, one was taken for the other, and the largest of two numbers came out as their sum.
    """
    from numba.core.registry import CPUDispatcher

    from fusedadam.backends.numba import memory, ops

    found = vars(memory) | vars(ops)
    names = [value.py_func.__qualname__ for value in found.values() if isinstance(value, CPUDispatcher)]
    assert len(set(names)) == len(names) > 5
    assert not any("<locals>" in name for name in names)
