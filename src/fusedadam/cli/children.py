"""Processes that a command starts: only the command itself reacts to Ctrl-C, which a terminal sends to all of them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """Processes started in this block do not receive Ctrl-C, not even while they import; we receive it at its end.

    A blocked signal is inherited, so it is blocked from the first instruction on. A process can ignore it only later
    (:func:`ignore_sigint`), and until then would print a traceback from the middle of an import.
    """
    heard: list[object] = []
    with contextlib.ExitStack() as undo:

        @undo.callback
        def deliver() -> None:
            if heard:
                signal.raise_signal(signal.SIGINT)

        # another thread may receive it, even if it is blocked in this one
        before = signal.signal(signal.SIGINT, lambda *which: heard.append(which))
        undo.callback(signal.signal, signal.SIGINT, before)
        if hasattr(signal, "pthread_sigmask"):
            resource_tracker.ensure_running()  # multiprocessing's own helper: starting it later would unblock SIGINT
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        yield


def ignore_sigint() -> None:
    """The first call of such a process, for systems that cannot block signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
