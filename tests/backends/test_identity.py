"""Triton's hash of itself: the value that Triton computes, without the half second."""

import importlib
import os
import time
from pathlib import Path

import pytest

from fusedadam.codegen import cache_files
from tests.support import run_program

pytest.importorskip("triton")
from fusedadam.backends.triton import identity

PROGRAM = """
import importlib
from fusedadam.backends.triton import identity
module = next(m for m in map(importlib.import_module, identity.MODULES) if hasattr(m, identity.FUNCTION))
computed = getattr(module, identity.FUNCTION)
identity.recall()
print(computed.cache_info().currsize, getattr(module, identity.FUNCTION)(), sep="\\n")
"""


@pytest.fixture
def triton_like(tmp_path) -> Path:
    (tmp_path / "_C").mkdir()
    (tmp_path / "_C/libtriton.so").write_bytes(b"compiler")
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler/code.py").write_text("1")
    return tmp_path


def start(cache: Path) -> list[str]:
    return run_program(PROGRAM, **{cache_files.VARIABLE: str(cache)}).stdout.splitlines()


def test_the_second_process_has_the_same_key_without_computing_it(tmp_path):
    computations, key = start(tmp_path)
    assert computations == "1"
    assert start(tmp_path) == ["0", key]
    (file,) = tmp_path.glob("triton_*")
    file.write_bytes(file.read_bytes()[:-1])
    assert start(tmp_path) == ["1", key], "a damaged file was believed"


@pytest.mark.parametrize("change", ["edited", "touched", "added", "gone"])
def test_another_triton_has_another_name(change, triton_like):
    before = identity._files_of(triton_like)
    assert identity._files_of(triton_like) == before
    code = triton_like / "compiler/code.py"
    if change == "edited":
        code.write_text("23")
    elif change == "touched":
        os.utime(code, ns=(time.time_ns(), time.time_ns() + 10**9))
    elif change == "added":
        (triton_like / "compiler/more.py").write_text("")
    else:
        code.unlink()
    assert identity._files_of(triton_like) != before


def test_a_triton_without_such_a_function_is_left_alone(monkeypatch):
    monkeypatch.setattr(identity, "FUNCTION", "no such function")
    identity.recall.__wrapped__()


def test_a_function_that_keeps_no_result_is_left_alone(monkeypatch):
    module = next(m for m in map(importlib.import_module, identity.MODULES) if hasattr(m, identity.FUNCTION))

    def other() -> str:
        return "a key"

    monkeypatch.setattr(module, identity.FUNCTION, other)
    identity.recall.__wrapped__()
    assert getattr(module, identity.FUNCTION) is other
