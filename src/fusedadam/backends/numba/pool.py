"""One pool of threads for the whole process, shared by all optimizers and by every Python thread that steps."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None
_workers = 0


def _forget() -> None:
    """A forked child has the pool's bookkeeping but none of its threads."""
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def share(work: Callable[[], object], threads: int) -> None:
    """Calls ``work`` on so many threads, the caller's own among them. It takes what is left to do until nothing is.

    So a thread that starts late, or shares its core (torch's own spin for a while after a backward pass), does less.
    """
    try:
        futures = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    except RuntimeError:  # shutting down, or another thread has just replaced this pool: the caller does it all
        futures = []
    try:
        work()
    finally:
        _wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


def _wait(futures: list[Future[object]]) -> None:
    """To the end, whatever comes: the memory that the threads write to may be freed once we leave."""
    try:
        wait(futures)
    except BaseException:  # Ctrl-C
        _wait(futures)
        raise


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
