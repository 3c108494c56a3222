"""Processes that want the same kernel at the same time: one compiles it, and the others wait."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

from fusedadam.codegen import cache_files
from tests.codegen.one_kernel import forget, fresh, hit

pytest.importorskip("fcntl")
HOLDS = """
import sys, time
from fusedadam.codegen import cache_files
with cache_files.alone_with(sys.argv[1]) as has_waited:
    print(has_waited, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(folder):
    """``begin(name)``: another process that locks a name until it is told to end."""
    started = []

    def begin(name: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        started.append(process)
        assert process.stdout.readline() == "False\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def waited(name: str = "a kernel") -> bool:
    with cache_files.alone_with(name) as has_waited:
        return has_waited


@pytest.mark.parametrize("ends", ["as it should", "killed"])
def test_others_wait_until_the_holder_ends(ends, holder, monkeypatch):
    process = holder("a kernel")
    monkeypatch.setattr(time, "sleep", lambda _: process.kill() if ends == "killed" else process.communicate("\n"))
    assert waited()
    assert not waited()


def test_another_name_is_not_waited_for(holder):
    holder("a kernel")
    assert not waited("another kernel")


def test_a_holder_that_hangs_is_not_waited_for_longer_than_a_while(holder, monkeypatch):
    monkeypatch.setattr(cache_files, "PATIENCE", 0.1)
    holder("a kernel")
    begun = time.monotonic()
    assert waited()
    assert 0.1 <= time.monotonic() - begun < 30


def test_what_another_process_has_compiled_meanwhile_is_not_compiled_again(folder, monkeypatch):
    """The other process is played by the lock: while this one waits, the file appears."""
    assert not hit()
    path, content = next((p, p.read_bytes()) for p in folder.glob("faults_*" + cache_files.SUFFIX))
    path.unlink()

    @contextlib.contextmanager
    def alone_with(name):
        path.write_bytes(content)
        yield True

    monkeypatch.setattr(cache_files, "alone_with", alone_with)
    forget()
    assert fresh().was_cached


@pytest.mark.parametrize("broken", ["the file", "the system"])
def test_where_files_cannot_be_locked_nobody_waits(broken, folder, monkeypatch):
    folder.mkdir()
    if broken == "the file":
        (folder / cache_files.LOCKS).mkdir()
    else:
        monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    assert not waited()
    assert not hit()
