"""Processes that a command starts: Ctrl-C, which a terminal sends to all of them, is the command's alone to answer."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def born_deaf() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C, not even while their interpreters start; we hear it at the end.

    That a signal is blocked is inherited, from the first instruction on. Ignoring it is the process's own doing
    (:func:`stay_deaf`), which may come too late: it would complain in the middle of an import. So it would if we were
    interrupted while we are telling it what to do.
    """
    heard = False

    def hear(*_: object) -> None:
        nonlocal heard
        heard = True

    before = signal.signal(signal.SIGINT, hear)  # another thread of ours may get it, blocked here or not
    try:
        with _blocked():
            yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing's own helper: starting it unblocks what was blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """The first thing that such a process does, for systems that cannot block signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
