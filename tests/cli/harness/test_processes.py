"""Processes that answer, hang and end."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from typing import Any

import pytest

from fusedadam.cli.harness import processes
from fusedadam.cli.harness.processes import Failed, Worker


class Answering:
    """Made in another process."""

    def __init__(self, word: str) -> None:
        self.word = word

    def say(self) -> tuple[str, int]:
        return self.word, os.getpid()

    def rest(self) -> None:
        time.sleep(1000)


def ask(worker: Worker, command: str) -> Any:
    worker.tell(command)
    return worker.answer()


@pytest.fixture
def no_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that processes are forked from would stay, and is not the one that other tests want."""
    monkeypatch.setattr(processes, "_context", lambda device: multiprocessing.get_context("spawn"))


@pytest.mark.usefixtures("no_server_is_left")
def test_a_process_answers_and_is_gone_afterwards() -> None:
    with contextlib.closing(Worker(functools.partial(Answering, "hello"), "cpu", limit=600)) as worker:
        word, pid = ask(worker, "say")
        assert word == "hello"
        assert pid != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("no_server_is_left")
def test_a_process_that_hangs_is_ended_at_its_limit() -> None:
    began = time.monotonic()
    with contextlib.closing(Worker(functools.partial(Answering, ""), "cpu", limit=600)) as worker:
        _, pid = ask(worker, "say")
        worker.limit = 0.5
        with pytest.raises(Failed, match=r"no answer within 0\.5 seconds"):
            ask(worker, "rest")
    assert time.monotonic() - began < 900, "it was not waited for"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
