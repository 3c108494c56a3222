"""Processes of their own for contestants: none can warm up or break another, and each may hang or crash."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fusedadam.cli.children import ignore_sigint, sigint_blocked

LONGEST_REASON = 200
LONGEST_END = 5.0  # seconds for an idle process to exit, with everything that it has started
LONGEST_START = 120.0  # seconds; the first process waits for the server to import torch

# Slow imports, and nothing that computes; a module that is not installed is skipped. The first optimizer of a process
# imports torch._dynamo.
PRELOADED = ["fusedadam.cli.contestants", "fusedadam.backends.numba", "torch._dynamo", __name__]


class Failed(Exception):
    """Why there is no answer."""


class Worker:
    """A process that answers commands, the methods of what ``made`` returns there, each within ``limit`` seconds."""

    def __init__(self, made: Callable[[], Any], device: str, limit: float) -> None:
        self.limit, self._ready, self._idle = limit, False, True
        log, name = tempfile.mkstemp(prefix="fusedadam-bench-", suffix=".log")
        os.close(log)
        self._log = Path(name)
        self._connection, theirs = multiprocessing.Pipe()
        self._process: BaseProcess = _context(device).Process(target=serve, args=(theirs, name, made), daemon=False)
        try:
            with sigint_blocked():
                self._process.start()
        except KeyboardInterrupt:  # it comes at the end of that block, when the process has started
            self._idle = False
            self.close()
            raise
        theirs.close()

    def tell(self, command: str) -> None:
        """Sends a command without waiting, so that other processes can start at the same time."""
        self._idle = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # answer() says why
            self._connection.send(command)

    def answer(self) -> Any:
        try:
            if not self._ready:
                self._receive(LONGEST_START)
                self._ready = True
            done, answer = self._receive(self.limit)
            self._idle = True
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise Failed(_ending(self._process.exitcode, self._log)) from None
        if not done:
            raise Failed(one_line(answer))
        return answer

    def _receive(self, limit: float) -> Any:
        if not self._connection.poll(limit):
            raise Failed(f"no answer within {limit:g} seconds (--limit)")
        return self._connection.recv()

    def close(self) -> None:
        """Lets an idle process exit and kills a busy one; a second call does nothing."""
        if self._connection.closed:
            return
        self._connection.close()
        self._process.join(LONGEST_END if self._idle else 0)
        if self._process.pid is not None and self._process.is_alive() and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.is_alive():  # it has no process group of its own (yet)
            self._process.kill()
        self._process.join()
        self._log.unlink(missing_ok=True)


def serve(connection: Connection, log: str, made: Callable[[], Any]) -> None:
    """Answers commands until the other side closes the connection. Errors are answers, too."""
    ignore_sigint()
    if hasattr(os, "setsid"):
        os.setsid()  # so that it can be killed together with everything that it starts
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    answering = made()
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while command := connection.recv():
            try:
                answer = True, getattr(answering, command)()
            except BaseException as error:
                answer = False, f"{type(error).__name__}: {error}"
            connection.send(answer)


def _context(device: str) -> Any:
    """Forked from a server that has imported torch and this package and done nothing else: fresh, but quickly ready.

    On a GPU each process is spawned: an import may have called the driver, which must not happen before a fork.
    """
    if sys.platform == "win32" or device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _ending(code: int | None, log: Path) -> str:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = f"; it said last: {said[-1].strip()}" if said else ""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        killed = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return one_line(f"crashed with {name}{killed}{last}")
    return one_line(f"ended with exit code {code}{last}")


def one_line(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"
