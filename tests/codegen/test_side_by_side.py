"""Kernels that other processes compile; whatever they cannot do is done here, with the same errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fusedadam import codegen
from fusedadam.backends import numba as backend
from fusedadam.codegen import side_by_side
from tests.codegen.one_kernel import KERNEL, forget

SOURCES = [("faults", KERNEL.format(amount=amount)) for amount in (1, 2, 3)]


@pytest.fixture(autouse=True)
def idle(folder, monkeypatch):
    monkeypatch.setattr(side_by_side, "idle_cores", lambda: 3)
    monkeypatch.setattr(side_by_side, "PATIENCE", 600.0)  # the machine may be busy
    forget()


def compiled(sources=SOURCES) -> list[bool]:
    """Whether each was found in the cache after ``compile_missing``."""
    codegen.compile_missing(sources, backend.made_for())
    return [codegen.function(*source, backend.made_for()).was_cached for source in sources]


def test_one_is_compiled_here_and_the_others_elsewhere(folder):
    assert compiled() == [False, True, True]
    forget()
    assert compiled() == [True, True, True]
    assert not list(folder.glob("*.tmp"))


def test_the_same_source_twice_is_compiled_once():
    assert compiled([SOURCES[0], SOURCES[0]]) == [False, False]
    assert len([name for name in codegen.functions if name.startswith("faults")]) == 1


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_an_error_is_the_compilers_own_wherever_it_is_compiled(broken):
    sources = [*SOURCES]
    sources[broken] = ("faults", "1 / 0")
    with pytest.raises(ZeroDivisionError):
        compiled(sources)


@pytest.mark.parametrize(
    "failure", ["no program", "unknown program", "frozen program", "another program", "other settings", "no core"]
)
def test_without_the_other_processes_all_are_compiled_here(failure, monkeypatch):
    if failure == "no program":
        monkeypatch.setattr(sys, "executable", "/no/such/program")
    elif failure == "unknown program":
        monkeypatch.setattr(sys, "executable", None)
    elif failure == "frozen program":  # as PyInstaller makes it: sys.executable is the user's own, not Python
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif failure == "another program":
        monkeypatch.setattr(sys, "executable", "false")
    elif failure == "other settings":
        monkeypatch.setattr(side_by_side.object_code, "made_for", lambda: "another Numba")
    else:
        monkeypatch.setattr(side_by_side, "idle_cores", lambda: 1)
    assert compiled() == [False, False, False]


def test_an_interrupt_ends_the_other_processes(monkeypatch):
    started, start = [], side_by_side._start

    def watched(*asked):
        started.append(start(*asked))
        return started[-1]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "_start", watched)
    monkeypatch.setattr(codegen, "_function", interrupt)
    with pytest.raises(KeyboardInterrupt):
        codegen.compile_missing(SOURCES, backend.made_for())
    assert len(started) == 2
    assert all(worker.poll() is not None for worker in started)


def test_a_process_that_hangs_is_not_waited_for(monkeypatch):
    hanging = []

    def start(*_):
        hanging.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))
        return hanging[-1]

    monkeypatch.setattr(side_by_side, "PATIENCE", 0.1)
    monkeypatch.setattr(side_by_side, "_start", start)
    assert compiled() == [False, False, False]
    assert [worker.poll() is not None for worker in hanging] == [True, True]
