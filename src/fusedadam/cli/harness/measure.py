"""Measures contestants that take turns: other programs on the machine then slow all of them alike."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedadam.cli.harness.contestant import Contestant, Job, Params
from fusedadam.cli.harness.processes import Failed, Worker
from fusedadam.cli.harness.shapes import Shape, parameters
from fusedadam.cli.harness.timing import Pace

# What a contestant may need, in units of its parameters: parameters, gradients, three states, and as many temporaries.
ROOM = 8
LONGEST, ENOUGH_TURNS = 20.0, 3  # seconds after which no further turn begins, once there were enough
SAME_STATE = 0.05  # a smaller difference in size comes from sums and counts, not from another format of the states
Make = Callable[[Params], Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Conditions:
    """The same for all contestants."""

    device: str
    pace: Pace
    free_bytes: float = math.inf
    isolated: bool = False  # whether each contestant has a process of its own
    limit: float = 60.0  # seconds that such a process may take to answer


@dataclass
class Measured:
    """The turns of one contestant on one set, or why it failed."""

    ms: list[float] = field(default_factory=list)
    copied_per_ms: list[float] = field(default_factory=list)
    against_ours: list[float] = field(default_factory=list)  # its time over that of the first contestant, per turn
    bytes_moved: int | None = None
    account: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None

    def extend(self, more: Measured) -> None:
        self.ms += more.ms
        self.copied_per_ms += more.copied_per_ms
        self.against_ours += more.against_ours
        self.bytes_moved = self.bytes_moved if more.bytes_moved is None else more.bytes_moved
        self.account = more.account or self.account
        self.failed = self.failed or more.failed


def measure(
    makes: Mapping[str, Make], sets: Sequence[Sequence[Shape]], dtype: str, conditions: Conditions,
    say: Say = lambda doing: None,
) -> list[dict[str, Measured]]:  # fmt: skip
    """Times contestants on each set, as many at a time as fit into memory. The first one is the one they are
    compared with."""
    found = [{name: Measured() for name in makes} for _ in sets]
    for names in rounds(list(makes), room(max(map(parameters, sets)), dtype, conditions)):
        jobs = {name: Job(makes[name], sets, dtype, conditions.device, conditions.pace.seconds) for name in names}
        with contextlib.ExitStack() as stack:
            started = {name: stack.enter_context(_start(job, conditions)) for name, job in jobs.items()}
            turns = _Turns(started, conditions, say)
            for which, own in enumerate(found):
                for name, more in turns.take(which).items():
                    own[name].extend(more)
    return found


def copied_per_ms(measured: Iterable[Measured]) -> float:
    """The median over the copies of all contestants, so that bars of the same length mean the same time."""
    return statistics.median([copied for one in measured for copied in one.copied_per_ms] or [math.nan])


def bytes_moved(own: Measured, ours: Measured) -> int | None:
    """A peer must move what ours must, except that smaller or larger states are each read and written."""
    if own.bytes_moved is not None or ours.bytes_moved is None:
        return own.bytes_moved
    if not (own.account and ours.account):
        return ours.bytes_moved
    kept = ours.account["state_bytes"]
    more = int(own.account["state_bytes"]) - int(kept)
    return ours.bytes_moved + (2 * more if abs(more) > SAME_STATE * kept else 0)


def room(count: int, dtype: str, conditions: Conditions) -> float:
    """How many contestants with ``count`` parameters fit into two thirds of the free memory."""
    copies = 2**27 if conditions.device == "cpu" else 2**31
    return conditions.free_bytes * 2 / 3 // (ROOM * bytes_each(dtype) * count + copies)


def bytes_each(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def rounds(names: Sequence[str], at_once: float) -> Iterator[tuple[str, ...]]:
    """The first contestant takes part in every round, since only turns of the same round can be compared."""
    first, *others = names
    width = int(max(1, min(len(others), at_once - 1)))
    for k in range(0, max(1, len(others)), width):
        yield (first, *others[k : k + width])


class _Here:
    """A contestant in this process."""

    def __init__(self, job: Job) -> None:
        self.contestant: Contestant | None = Contestant(job)

    def tell(self, *command: Any) -> None:
        self.command = command

    def answer(self) -> Any:
        name, *arguments = self.command
        return getattr(self.contestant, name)(*arguments)

    def end(self) -> None:
        self.contestant = None


@contextlib.contextmanager
def _start(job: Job, conditions: Conditions) -> Iterator[_Here | Worker]:
    started = Worker(Contestant, job, job.device, conditions.limit) if conditions.isolated else _Here(job)
    try:
        yield started
    finally:
        started.end()


class _Turns:
    """Contestants that take turns. One that fails is ended, and the others go on."""

    def __init__(self, started: Mapping[str, _Here | Worker], conditions: Conditions, say: Say) -> None:
        self.started, self.pace, self.say = started, conditions.pace, say
        self.accounted = conditions.isolated  # torch's profiler prints to the terminal of its process
        self.measured = {name: Measured() for name in started}

    def take(self, which: int) -> dict[str, Measured]:
        """Turns on one set of parameters. Contestants that failed on an earlier set do not take part."""
        self.measured = {name: Measured(failed=own.failed) for name, own in self.measured.items()}
        for name in self._alive():  # they all start at the same time, since this is not measured
            self.started[name].tell("prepare", which)
        for name, moved in self._each("first steps"):
            self.measured[name].bytes_moved = moved
        ours, *_ = self.measured.values()
        began = time.monotonic()
        for k in range(self.pace.turns):
            if k >= ENOUGH_TURNS and time.monotonic() - began > LONGEST:
                break
            for name, (ms, copied) in self._each(f"turn {k + 1} of {self.pace.turns}", "turn", first=k):
                self.measured[name].ms.append(ms)
                self.measured[name].copied_per_ms.append(copied)
            for name in self._alive() if not ours.failed else ():
                self.measured[name].against_ours.append(self.measured[name].ms[-1] / ours.ms[-1])
        for name, account in self._each("memory", "account") if self.accounted else ():
            self.measured[name].account = account
        return self.measured

    def _alive(self) -> list[str]:
        return [name for name, own in self.measured.items() if not own.failed]

    def _each(self, what: str, command: str | None = None, first: int = 0) -> Iterator[tuple[str, Any]]:
        """The answers of one after the other, starting with a different one each time: neighbours must not matter."""
        names = self._alive()
        begin = first % max(1, len(names))
        for name in names[begin:] + names[:begin]:
            self.say(f"{name}: {what}")
            try:
                if command is not None:
                    self.started[name].tell(command)
                answer = self.started[name].answer()
            except Failed as reason:
                self.measured[name].failed = str(reason)
                self.started[name].end()
            else:
                yield name, answer
