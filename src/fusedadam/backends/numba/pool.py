"""One pool of threads for the whole process, shared by all optimizers and by every Python thread that steps."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None
_workers = 0


def _forget() -> None:
    """A forked child has the pool's bookkeeping but none of its threads."""
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def share(work: Callable[[int, int], object], pieces: int, bounds: list[int]) -> None:
    """Calls ``work(bounds[k], bounds[k + 1])`` for every k on ``pieces`` threads, the caller's own among them."""
    futures: list[Future[object]] = []
    mine = len(bounds) - 2  # the caller works from the end, so that the pool can start at once
    for first, last in itertools.pairwise(bounds[: mine + 1]):
        try:
            futures.append(_pool(pieces - 1).submit(work, first, last))
        except RuntimeError:  # the interpreter is shutting down: no new threads, but the work is still done
            work(first, last)
    try:
        work(bounds[mine], bounds[mine + 1])
    finally:
        for future in futures:
            future.result()


def _pool(workers: int) -> ThreadPoolExecutor:
    global _executor, _workers
    with _lock:
        if _executor is None or _workers < workers:
            # threads start on demand and the old pool's end once idle, so growing costs nothing later
            old, _executor = _executor, ThreadPoolExecutor(workers, thread_name_prefix="fusedadam")
            _workers = workers
            if old is not None:
                old.shutdown(wait=False)
        return _executor
