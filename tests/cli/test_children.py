"""Ctrl-C is for the command, and never for the processes it has started, however early it comes."""

import concurrent.futures
import multiprocessing
import signal
import subprocess
import sys
import threading

import pytest

from fusedadam.cli.children import ignore_sigint, sigint_blocked

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs a system that blocks signals")


def is_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def is_ignored() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def tell(connection) -> None:
    connection.send(is_blocked())


def start_one(method) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context(method).Process(target=tell, args=(theirs,))
    with sigint_blocked():
        process.start()
    assert not is_blocked()
    assert ours.poll(900)
    assert ours.recv()
    process.join()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_is_deaf_before_it_does_anything(method):
    """Started from a process of its own: the server that others are forked from would stay, and has its own mask."""
    program = f"from tests.cli.test_children import start_one; start_one({method!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


def test_so_are_the_processes_of_a_pool_which_ignore_sigint():
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=ignore_sigint)
    with pool:
        with sigint_blocked():
            asked = [pool.submit(is_blocked), pool.submit(is_ignored)]
        assert [future.result(timeout=900) for future in asked] == [True, True]


@pytest.fixture
def signals():
    """What Ctrl-C has done."""
    heard = []
    before = signal.signal(signal.SIGINT, lambda *which: heard.append(which))
    yield heard
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_late_and_not_lost(signals):
    with sigint_blocked():
        signal.raise_signal(signal.SIGINT)
        assert signals == []
    assert len(signals) == 1


def test_nor_does_it_come_by_way_of_another_thread(signals):
    go = threading.Event()
    other = threading.Thread(target=lambda: go.wait() and signal.raise_signal(signal.SIGINT))
    other.start()  # before the signal is blocked, so that this thread still gets it
    with sigint_blocked():
        go.set()
        other.join()
        assert signals == []
    assert len(signals) == 1
