"""Ctrl-C is for the command, and never for the processes it has started, however early it comes."""

import concurrent.futures
import multiprocessing
import signal

import pytest

from fusedadam.cli.children import born_deaf, stay_deaf

pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs a system that blocks signals")


def is_blocked() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def is_ignored() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def tell(connection) -> None:
    connection.send(is_blocked())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_is_deaf_before_it_does_anything(method):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context(method).Process(target=tell, args=(theirs,))
    with born_deaf():
        process.start()
    assert not is_blocked()
    assert ours.poll(60)
    assert ours.recv()
    process.join()


def test_so_are_the_processes_of_a_pool_which_stay_deaf():
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=stay_deaf)
    with pool:
        with born_deaf():
            asked = [pool.submit(is_blocked), pool.submit(is_ignored)]
        assert [future.result(timeout=60) for future in asked] == [True, True]


def test_ctrl_c_is_late_and_not_lost():
    signals = []
    before = signal.signal(signal.SIGINT, lambda *which: signals.append(which))
    try:
        with born_deaf():
            signal.raise_signal(signal.SIGINT)
            assert signals == []
        assert len(signals) == 1
    finally:
        signal.signal(signal.SIGINT, before)
