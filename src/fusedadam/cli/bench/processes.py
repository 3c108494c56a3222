"""Processes of their own: none warms or breaks another, and one that hangs or dies is a line in the table."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from fusedadam.cli.bench import worker
from fusedadam.cli.children import born_deaf

LONGEST_REASON = 200
LONGEST_END = 5.0  # seconds to leave in order, with whatever it has started
LONGEST_START = 120.0  # seconds, most of them the first one's, which imports torch


class Failed(Exception):
    """Why there is no answer."""


class Worker:
    """A process that answers commands, each within ``limit`` seconds. ``with`` ends it, whatever it is doing."""

    def __init__(self, made: Callable[[Any], Any], given: Any, device: str, limit: float) -> None:
        self.limit, self._ready, self._idle = limit, False, True
        log, name = tempfile.mkstemp(prefix="fusedadam-bench-", suffix=".log")
        os.close(log)
        self._log = Path(name)
        self._connection, theirs = multiprocessing.Pipe()
        self._process: BaseProcess = _context(device).Process(
            target=worker.serve, args=(theirs, str(self._log), made, given), daemon=False
        )
        with born_deaf():
            self._process.start()
        theirs.close()

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.answer()

    def tell(self, *command: Any) -> None:
        """Sends a command and does not wait: others can begin meanwhile."""
        self._idle = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer will say why
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
            raise Failed(_one_line(answer))
        return answer

    def _receive(self, limit: float) -> Any:
        if not self._connection.poll(limit):
            raise Failed(f"no answer within {limit:g} seconds (--limit)")
        return self._connection.recv()

    def end(self) -> None:
        """Lets it go if it is waiting, and kills it if it is not; calling it again does nothing."""
        if self._connection.closed:
            return
        self._connection.close()
        self._process.join(LONGEST_END if self._idle else 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.pid is not None and self._process.is_alive():
                if hasattr(os, "killpg"):
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
        if self._process.is_alive():  # it had no group of its own yet
            self._process.kill()
        self._process.join()
        self._log.unlink(missing_ok=True)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end()


def _context(device: str) -> Any:
    """Forked from a process that has imported torch and this package, and done nothing: fresh, but soon ready.

    Where there is a GPU an import may already have asked its driver something, which must not happen before a fork.
    """
    if sys.platform == "win32" or device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fusedadam.cli.bench.fresh"])
    return context


def _ending(code: int | None, log: Path) -> str:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = f"; it said last: {said[-1].strip()}" if said else ""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        killed = ", as a system does that is out of memory" if name == "SIGKILL" else ""
        return _one_line(f"crashed with {name}{killed}{last}")
    return _one_line(f"ended with exit code {code}{last}")


def _one_line(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"
