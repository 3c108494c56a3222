"""Processes that answer, hang and end."""

from __future__ import annotations

import multiprocessing
import os
import time

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


@pytest.fixture
def no_server_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that processes are forked from would stay, and is not the one that other tests want."""
    monkeypatch.setattr(processes, "_context", lambda device: multiprocessing.get_context("spawn"))


@pytest.mark.usefixtures("no_server_is_left")
def test_a_process_answers_and_is_gone_afterwards() -> None:
    with Worker(Answering, "hello", "cpu", limit=60) as worker:
        word, pid = worker.ask("say")
        assert word == "hello"
        assert pid != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("no_server_is_left")
def test_a_process_that_hangs_is_ended_at_its_limit() -> None:
    began = time.monotonic()
    with Worker(Answering, "", "cpu", limit=3) as worker:
        _, pid = worker.ask("say")
        with pytest.raises(Failed, match=r"no answer within 3 seconds"):
            worker.ask("rest")
    assert time.monotonic() - began < 300
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
