"""Process groups (gloo) for tests: persistent processes that run one function after another together.

They are forked from a server that has imported torch once, so a world of four starts in a fraction of a second. If a
failed test breaks a world, the next test gets a new one at no cost.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

LIMIT = 180.0  # seconds in which whatever happens must have happened: kernels may be compiled, on a busy machine
GRACE = 3.0  # seconds in which the others are heard after one has failed: most fail of the same
PRELOADED = ["tests.distributed.preload"]
# FSDP2 records events of a CPU's streams. In torch 2.6 these have none, so it needs a GPU there.
FSDP2_RUNS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
NO_FSDP2_ON_CPU = "AttributeError: 'Stream' object has no attribute 'record_event'"
# what torch itself refuses to do, in some versions
REFUSALS = (NO_FSDP2_ON_CPU, "FSDP+TP sharding does not support uneven sharding")
NEEDS_FSDP2_ON_CPU = pytest.mark.skipif(
    not FSDP2_RUNS_ON_CPU, reason=f"fully_shard of torch {torch.__version__} does not run on a CPU: {NO_FSDP2_ON_CPU}"
)


def destroy_process_group(destroy: Callable[[], None] = dist.destroy_process_group) -> None:
    """Of this process itself. torch waits for gloo's thread with the GIL held; if that thread has not yet forgotten its
    last call, for which it needs the GIL, both wait for ever. So it gets time."""
    time.sleep(0.2)
    destroy()


class Answer(NamedTuple):
    """What became of the call on one rank: its result, or what went wrong in words."""

    ok: bool
    value: Any


class World:
    """``run(function, *arguments)`` calls it in every process at once, and returns what each of them returned.

    The function must be at the top of a module, and all that goes in and out is pickled, tensors by value.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def run(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Any]:
        answers = self.outcomes(function, *arguments, limit=limit)
        failed: dict[str, list[int]] = {}  # most often all fail of the same: it is said once
        for rank, answer in enumerate(answers):
            if not answer.ok:
                failed.setdefault(answer.value, []).append(rank)
        if failed:
            texts = [f"rank {', '.join(map(str, ranks))} of {self.size}: {text}" for text, ranks in failed.items()]
            said = {text.rstrip().rpartition("\n")[2] for text in failed}
            if all(any(refusal in line for refusal in REFUSALS) for line in said):
                pytest.skip(f"torch {torch.__version__}: {said.pop()}")
            raise AssertionError("\n".join(texts))
        return [answer.value for answer in answers]

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT, grace: float = GRACE
    ) -> list[Answer]:
        """As ``run``, but tells of every rank what became of it. If one fails the others are heard for ``grace`` more
        seconds, and the processes end: their group is in no state to go on with."""
        self._begin()
        call = pickle.dumps((function.__module__, function.__qualname__, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # one that has died since is found out below
                pipe.send_bytes(call)
        answers: dict[int, Answer] = {}
        begun = time.monotonic()
        end = begun + limit
        while len(answers) < self.size and time.monotonic() < end:
            for pipe in wait([p for k, p in enumerate(self._pipes) if k not in answers], timeout=0.1):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                answers[rank] = answer = Answer(*self._heard(rank))
                if not answer.ok:
                    end = min(end, time.monotonic() + grace)
        late = f"did not answer within {time.monotonic() - begun:.0f} s; it was at\n"
        for rank in [rank for rank in range(self.size) if rank not in answers]:
            answers[rank] = Answer(False, late + self._where(rank))
        if not all(answer.ok for answer in answers.values()):
            self.end()
        return [answers[rank] for rank in range(self.size)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes = [], []

    def _begin(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.mkdtemp()
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.size, self._folder), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _heard(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            self._processes[rank].join(LIMIT)
            stack = _stack_file(self._folder, rank).read_text()
            return False, f"the process ended, with exit code {self._processes[rank].exitcode}\n{stack}".rstrip()

    def _where(self, rank: int) -> str:
        """Where a process is that does not answer: it is asked, and gets time to say so on a busy machine."""
        with contextlib.suppress(OSError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            for _ in range(100):
                time.sleep(0.1)
                if said := _stack_file(self._folder, rank).read_text():
                    return said
        return "an unknown place"


def on(world: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of a function that every process of the world (a fixture) calls; all must return the same."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        own = [*inspect.signature(function).parameters.values()]

        @functools.wraps(function)
        def test(**given: Any) -> None:
            first, *others = given.pop(world).run(function, *(given[parameter.name] for parameter in own))
            assert all(answer == first for answer in others), f"processes returned {[first, *others]}"

        fixture = inspect.Parameter(world, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([fixture, *own])  # type: ignore[attr-defined]
        test.in_processes = function  # type: ignore[attr-defined]
        return test

    return decorate


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack of rank {rank}"


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    with _stack_file(folder, rank).open("w") as stack:
        faulthandler.enable(file=stack)  # a crash says where it was
        faulthandler.register(signal.SIGUSR1, file=stack)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT)
        )
        while True:
            try:
                module, name, arguments = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            ok, answer = _answer(module, name, arguments)
            pipe.send_bytes(answer)
            if not ok:
                # A script that raises ends. A process that lived on would keep its connections open, and one that waits
                # for it, rather than for the rank that failed first, would wait until the group's timeout.
                time.sleep(0.5)  # others may still be reading from it
                os._exit(1)


def _answer(module: str, name: str, arguments: tuple[Any, ...]) -> tuple[bool, bytes]:
    """Whether the call has returned, and that together with its result or error, pickled."""
    try:
        function = getattr(importlib.import_module(module), name)
        return True, pickle.dumps((True, getattr(function, "in_processes", function)(*arguments)))
    except BaseException:
        return False, pickle.dumps((False, traceback.format_exc()))
