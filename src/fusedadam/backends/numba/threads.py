"""The threads that kernels run on: torch's own, or a pool of ours where torch's are not available.

After a backward pass torch's threads spin for a while, waiting for more work; any other thread would have to share a
core with one of them. On Linux they are a team of GNU OpenMP, which any code in the process may use. A kernel is a C
function that takes chunks until there are none, so it does not matter when each thread starts, or how many there are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None
_workers = 0
_forked = False


def _forget() -> None:
    """A forked child inherits the bookkeeping of threads but not the threads. OpenMP does not recover from that."""
    global _executor, _lock, _forked
    _executor, _lock, _forked = None, threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def run_on_threads(function: int, argument: int, threads: int) -> None:
    """Calls the C function at an address with ``argument`` on this many threads, including the caller's own."""
    team = torchs_team() if threads > 1 and not _forked else None
    if team is not None:
        team(function, argument, threads, 0)
    elif threads == 1:
        _function(function)(argument)
    else:
        run_in_pool(functools.partial(_function(function), argument), threads)


@functools.cache
def torchs_team() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of the library that torch has loaded."""
    here = Path(torch.__file__).parent
    found = [
        *glob.glob(f"{here}/lib/libgomp*.so*"),
        *glob.glob(f"{here.parent}/torch.libs/libgomp*.so*"),
        "libgomp.so.1",
    ]
    for name in found:
        try:
            parallel: Any = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.restype, parallel.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return parallel  # type: ignore[no-any-return]
    return None


@functools.cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


def run_in_pool(work: Callable[[], object], threads: int) -> None:
    futures: list[Future[object]] = []
    try:
        with contextlib.suppress(RuntimeError):  # shutting down, or another thread has just replaced this pool
            for _ in range(threads - 1):
                futures.append(_pool(threads - 1).submit(work))
        work()
    finally:
        _wait([future for future in futures if not future.cancel()])
    for future in futures:
        if not future.cancelled():
            future.result()


def _wait(futures: list[Future[object]]) -> None:
    """Until all are done, even after an interrupt: the memory that they write to may be freed once we return."""
    try:
        wait(futures)
    except BaseException:  # Ctrl-C
        _wait(futures)
        raise


def _pool(workers: int) -> ThreadPoolExecutor:
    global _executor, _workers
    with _lock:
        if _executor is None or _workers < workers:
            # threads start on demand, and idle threads of the old pool end, so growing is cheap
            old, _executor = _executor, ThreadPoolExecutor(workers, thread_name_prefix="fusedadam")
            _workers = workers
            if old is not None:
                old.shutdown(wait=False)
        return _executor
