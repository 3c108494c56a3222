"""Measures one optimizer beside its peers: each in a process of its own, taking turns."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedadam.cli.bench.processes import Failed, Worker
from fusedadam.cli.bench.results import Curve, Point, Result, Set, Spread
from fusedadam.cli.bench.shapes import Shape, parameters
from fusedadam.cli.bench.timing import Pace
from fusedadam.cli.bench.worker import Job, Measured
from fusedadam.cli.contestants import OURS

# What a process may need, in units of its parameters: themselves, gradients, three states, and as many temporaries.
ROOM = 8
LONGEST, ENOUGH_TURNS = 20.0, 3  # seconds after which no further turn begins, if there were enough
SAME_STATE = 0.05  # a difference up to this is sums and counts, and not another way to keep the states
Say = Callable[[str], None]


@dataclass(frozen=True)
class Conditions:
    """The same for all that is measured."""

    device: str
    pace: Pace
    limit: float  # seconds a process may take for an answer
    free_bytes: int


@dataclass(frozen=True)
class Case:
    """An optimizer, and who computes it beside us."""

    optimizer: str
    peers: Sequence[str]
    dtype: str


@dataclass
class Turns:
    """What one process has answered so far, or why it no longer does."""

    ms: list[float] = field(default_factory=list)
    copied_per_ms: list[float] = field(default_factory=list)
    against_ours: list[float] = field(default_factory=list)
    bytes_moved: int | None = None
    account: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None

    def extend(self, more: Turns) -> None:
        self.ms += more.ms
        self.copied_per_ms += more.copied_per_ms
        self.against_ours += more.against_ours
        self.bytes_moved = self.bytes_moved if more.bytes_moved is None else more.bytes_moved
        self.account = more.account or self.account
        self.failed = self.failed or more.failed


def measure(case: Case, own: Set, shapes: Sequence[Shape], conditions: Conditions, say: Say) -> list[Result]:
    """Ours and its peers on one set of parameters; as many at a time as there is memory for."""
    turns = {by: Turns() for by in (OURS, *case.peers)}
    for names in rounds(case.peers, room(parameters(shapes), case.dtype, conditions)):
        with _started(names, case, [shapes], conditions, say) as together:
            together.take_turns(0)
            together.each("memory", lambda worker, own: own.account.update(worker.ask("account")))
        for by in names:
            turns[by].extend(together.turns[by])
    copied = copied_per_ms(turns.values())
    return [_result(case, by, own.name, one, turns[OURS], copied) for by, one in turns.items()]


def grow(case: Case, over: str, sets: Mapping[int, Sequence[Shape]], conditions: Conditions, say: Say) -> list[Curve]:
    """How the times of ours and its peers grow over sets of parameters, one process each for all of them."""
    points: dict[str, dict[int, Point]] = {by: {} for by in (OURS, *case.peers)}
    failed: dict[str, str | None] = {}
    for names in rounds(case.peers, room(max(map(parameters, sets.values())), case.dtype, conditions)):
        with _started(names, case, list(sets.values()), conditions, say) as together:
            for k, x in enumerate(sets):
                together.take_turns(k)
                for by in together.alive:
                    points[by][x] = _point(x, together.turns[by], together.turns)
        failed |= {by: one.failed for by, one in together.turns.items()}
    return [Curve(over, case.optimizer, by, case.dtype, tuple(own.values()), failed[by]) for by, own in points.items()]


def copied_per_ms(turns: Iterable[Turns]) -> float:
    """Of the large copies of all processes together: bars of the same length then mean the same time."""
    return statistics.median([copied for one in turns for copied in one.copied_per_ms] or [math.nan])


def room(count: int, dtype: str, conditions: Conditions) -> int:
    """How many processes fit into two thirds of the memory."""
    copies = 2**27 if conditions.device == "cpu" else 2**31
    return int(conditions.free_bytes * 2 / 3) // (ROOM * bytes_each(dtype) * count + copies)


def bytes_each(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def rounds(peers: Sequence[str], at_once: int) -> Iterator[tuple[str, ...]]:
    """Ours takes part in each, since only turns of one round can be compared."""
    width = max(1, at_once - 1)
    for k in range(0, max(1, len(peers)), width):
        yield (OURS, *peers[k : k + width])


class _Together:
    """Processes that take turns. One that fails is ended, and the others go on."""

    def __init__(self, workers: Mapping[str, Worker], conditions: Conditions, say: Say) -> None:
        self.workers, self.conditions, self.say = workers, conditions, say
        self.turns = {by: Turns() for by in workers}

    @property
    def alive(self) -> list[str]:
        return [by for by, one in self.turns.items() if not one.failed]

    def take_turns(self, which: int) -> None:
        """On a set of parameters; what was before is forgotten, but for failures."""
        self.turns = {by: Turns(failed=one.failed) for by, one in self.turns.items()}
        for by in self.alive:  # side by side: this is not measured
            self.workers[by].tell("prepare", which)
        self.each("first steps", lambda worker, own: setattr(own, "bytes_moved", worker.answer()))
        began = time.monotonic()
        for k in range(self.conditions.pace.turns):
            if k >= ENOUGH_TURNS and time.monotonic() - began > LONGEST:
                break
            self.each(f"turn {k + 1} of {self.conditions.pace.turns}", _turn, first=k)
            ours = self.turns[OURS]
            for by in self.alive if not ours.failed else ():
                self.turns[by].against_ours.append(self.turns[by].ms[-1] / ours.ms[-1])

    def each(self, what: str, do: Callable[[Worker, Turns], None], first: int = 0) -> None:
        """One after the other, beginning with another one each time: not always after the same neighbour."""
        names = self.alive
        begin = first % max(1, len(names))
        for by in names[begin:] + names[:begin]:
            self.say(f"{by}: {what}")
            try:
                do(self.workers[by], self.turns[by])
            except Failed as reason:
                self.turns[by].failed = str(reason)
                self.workers[by].end()


@contextlib.contextmanager
def _started(
    names: Sequence[str], case: Case, sets: Sequence[Sequence[Shape]], conditions: Conditions, say: Say
) -> Iterator[_Together]:
    with contextlib.ExitStack() as stack:
        jobs = [Job(case.optimizer, by, sets, case.dtype, conditions.device, conditions.pace.seconds) for by in names]
        workers = {
            job.by: stack.enter_context(Worker(Measured, job, conditions.device, conditions.limit)) for job in jobs
        }
        yield _Together(workers, conditions, say)


def _turn(worker: Worker, own: Turns) -> None:
    ms, copied_per_ms = worker.ask("turn")
    own.ms.append(ms)
    own.copied_per_ms.append(copied_per_ms)


def _result(case: Case, by: str, name: str, own: Turns, ours: Turns, copied: float) -> Result:
    if own.failed:
        return Result(case.optimizer, by, name, case.dtype, failed=own.failed)
    return Result(
        case.optimizer,
        by,
        name,
        case.dtype,
        ms=Spread.of(own.ms),
        turns=len(own.ms),
        against_ours=Spread.of(own.against_ours) if by != OURS and own.against_ours else None,
        bytes_moved=_bytes(own, ours),
        copy_gb_s=copied / 1e6,
        **own.account,
    )


def _bytes(own: Turns, ours: Turns) -> int | None:
    """A peer must move what ours must, but for states that it keeps smaller or larger, each read and written."""
    if own.bytes_moved is not None or ours.bytes_moved is None:
        return own.bytes_moved
    if not (own.account and ours.account):
        return ours.bytes_moved
    kept = ours.account["state_bytes"]
    more = int(own.account["state_bytes"]) - int(kept)
    return ours.bytes_moved + (2 * more if abs(more) > SAME_STATE * kept else 0)


def _point(x: int, own: Turns, everyone: Mapping[str, Turns]) -> Point:
    moved = _bytes(own, everyone[OURS])
    return Point(x, Spread.of(own.ms), None if moved is None else moved / copied_per_ms(everyone.values()))
