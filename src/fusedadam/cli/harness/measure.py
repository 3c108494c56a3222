"""Measures contestants that take turns, until there are enough turns that no other program disturbed.

Contestants that take turns meet the same clocks, temperatures and neighbours on the memory bus. While other programs
use the cores, turns do not make a ratio right (disturbance.py), so disturbed turns do not count.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fusedadam.cli.harness.contestant import Contestant, First, Make, Turn
from fusedadam.cli.harness.disturbance import MOST_WAITING
from fusedadam.cli.harness.processes import Failed, Worker, one_line
from fusedadam.cli.harness.shapes import Shape, parameters
from fusedadam.cli.harness.timing import Pace

# What a contestant may need, in units of its parameters: parameters, gradients, three states, and as many temporaries.
ROOM = 8
LONGEST, ENOUGH_TURNS = 20.0, 3
MOST_TURNS = 3  # as many as wanted, times this, if turns are disturbed
# Of the fastest copy in any turn, on an accelerator: one that other programs use gives the copy a part of its time.
SLOWEST_COPY = 0.9
SAME_STATE = 0.05  # a smaller difference in size comes from sums and counts, not from another format of the states


@dataclass(frozen=True)
class Conditions:
    """The same for all contestants."""

    device: str
    pace: Pace
    free_bytes: float = math.inf
    isolated: bool = False  # whether each contestant has a process of its own
    limit: float = 60.0  # seconds that such a process may take to answer
    longest: float = LONGEST  # seconds after which no further turn begins, once there were enough


@dataclass
class Measured:
    """The turns of one contestant that nothing disturbed, or why it failed."""

    ms: list[float] = field(default_factory=list)
    copied_per_ms: list[float] = field(default_factory=list)
    against_ours: list[float] = field(default_factory=list)  # its time over that of ``beside``, per turn
    beside: str = ""  # the contestant of ours that it is compared with
    first_ms: float | None = None  # the time of the first step
    bytes_moved: int | None = None
    state_bytes: int = 0  # of the tensors that it has, wherever they are
    allocated: int | None = None  # on a GPU, by the allocator
    failed: str | None = None
    disturbed: bool = False  # too many turns were: all of them are here, compared with nothing

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def kept_bytes(self) -> int:
        """What it keeps on the device beside parameters and gradients."""
        return self.state_bytes if self.allocated is None else self.allocated

    def begin(self, first: First) -> None:
        """If it is started again, later, what it compiled is in a cache."""
        self.first_ms = first.ms if self.first_ms is None else self.first_ms
        _, self.bytes_moved, self.state_bytes, self.allocated = first


def measure(
    makes: Mapping[str, Make], shapes: Sequence[Shape], dtype: str, conditions: Conditions,
    beside: Mapping[str, str] | None = None,
) -> dict[str, Measured]:  # fmt: skip
    """Times contestants, as many at a time as fit into memory, each compared with the one that ``beside`` names, or
    with the first one."""
    first, *others = makes
    found = {name: Measured(beside=(beside or {}).get(name, first)) for name in makes}
    device, pace = conditions.device, conditions.pace
    at_once = room(parameters(shapes), dtype, conditions)
    compared = {one: [name for name in others if found[name].beside == one] for one in makes}
    groups = [[one, *names] for one, names in compared.items() if names or one == first]
    for names in (names for group in groups for names in rounds(group, at_once)):
        with contextlib.ExitStack() as stack:
            started: dict[str, Here | Worker] = {}
            for name in names:
                made = partial(Contestant, makes[name], shapes, dtype, device, pace.seconds)
                isolated, is_peer = conditions.isolated, name != first
                started[name] = Worker(made, device, conditions.limit) if isolated else Here(made, is_peer)
                stack.callback(started[name].close)
            _take_turns(started, found, conditions)
    return found


def _take_turns(started: Mapping[str, Here | Worker], found: Mapping[str, Measured], conditions: Conditions) -> None:
    for name in started:  # they all start at the same time, since this is not measured
        if not found[name].failed:
            started[name].tell("prepare")
    for _ in _answers(started, found):
        pass
    for name, first in _answers(started, found, "first_step"):
        found[name].begin(first)
    taken: list[dict[str, Turn]] = []
    began = time.monotonic()
    while not _is_enough(taken, conditions, time.monotonic() - began):
        taken.append(dict(_answers(started, found, "turn", first=len(taken))))
    for name in started:
        _add(found[name], name, taken, conditions)


def _is_enough(taken: Sequence[Mapping[str, Turn]], conditions: Conditions, seconds: float) -> bool:
    wanted, device = conditions.pace.turns, conditions.device
    if len(taken) >= min(ENOUGH_TURNS, wanted) and seconds > conditions.longest:
        return True
    quiet = sum(_quiet(taken, each.values(), device) for each in taken)
    return quiet >= wanted or len(taken) >= MOST_TURNS * wanted


def _add(own: Measured, name: str, taken: Sequence[Mapping[str, Turn]], conditions: Conditions) -> None:
    """Counts the turns in which neither this contestant nor the one beside it was disturbed."""
    mine = [each for each in taken if name in each]
    pairs = [(each, [each[one] for one in {name, own.beside} & each.keys()]) for each in mine]
    counted = [each for each, pair in pairs if _quiet(taken, pair, conditions.device)]
    if len(counted) < (conditions.pace.turns + 1) // 2 and mine:
        own.disturbed, counted = True, mine
    own.ms += [each[name].ms for each in counted]
    own.copied_per_ms += [copied for each in counted if (copied := each[name].copied_per_ms) is not None]
    if not own.disturbed:
        own.against_ours += [each[name].ms / each[own.beside].ms for each in counted if own.beside in each]


def _quiet(taken: Sequence[Mapping[str, Turn]], turns: Iterable[Turn], device: str) -> bool:
    """Whether no other program disturbed these turns. Copies on a CPU vary by themselves, and prove nothing."""
    copies = [] if device == "cpu" else [turn.copied_per_ms or 0.0 for each in taken for turn in each.values()]
    slowest = SLOWEST_COPY * max(copies, default=0.0)
    return all(turn.waited <= MOST_WAITING and (turn.copied_per_ms or 0.0) >= slowest for turn in turns)


def _answers(
    started: Mapping[str, Here | Worker], found: Mapping[str, Measured], command: str | None = None, first: int = 0
) -> Iterator[tuple[str, Any]]:
    """Of one after the other, starting with a different one each time: neighbours must not matter.

    A contestant that fails is ended, and the others go on.
    """
    names = [name for name in started if not found[name].failed]
    begin = first % max(1, len(names))
    for name in names[begin:] + names[:begin]:
        try:
            if command is not None:
                started[name].tell(command)
            yield name, started[name].answer()
        except Failed as reason:
            found[name].failed = str(reason)
            started[name].close()


def copied_per_ms(measured: Iterable[Measured]) -> float | None:
    """The median over the copies of all contestants, so that bars of the same length mean the same time; None if other
    programs disturbed every one of them."""
    copies = [copied for one in measured for copied in one.copied_per_ms]
    return statistics.median(copies) if copies else None


def bytes_moved(own: Measured, ours: Measured) -> int | None:
    """A peer must move what ours must, except that smaller or larger states are each read and written. Not known if
    its states are not on the device."""
    elsewhere = own.kept_bytes < (1 - SAME_STATE) * own.state_bytes
    if own.bytes_moved is not None or ours.bytes_moved is None or elsewhere:
        return own.bytes_moved
    more = own.state_bytes - ours.state_bytes
    return ours.bytes_moved + (2 * more if abs(more) > SAME_STATE * ours.state_bytes else 0)


def room(count: int, dtype: str, conditions: Conditions) -> float:
    """How many contestants with ``count`` parameters fit into two thirds of the free memory."""
    copies = 2**27 if conditions.device == "cpu" else 2**31
    kind: torch.dtype = getattr(torch, dtype)
    return conditions.free_bytes * 2 / 3 // (ROOM * kind.itemsize * count + copies)


def rounds(names: Sequence[str], at_once: float) -> Iterator[tuple[str, ...]]:
    """The first contestant takes part in every round, since only turns of the same round can be compared."""
    first, *others = names
    width = int(max(1, min(len(others), at_once - 1)))
    for k in range(0, max(1, len(others)), width):
        yield (first, *others[k : k + width])


class Here:
    """A contestant in this process."""

    def __init__(self, made: Callable[[], Contestant], is_peer: bool) -> None:
        """``is_peer``: if it fails, the others go on."""
        self.is_peer = is_peer
        self.contestant: Contestant | None = made()

    def tell(self, command: str) -> None:
        self.command = command

    def answer(self) -> Any:
        try:
            return getattr(self.contestant, self.command)()
        except Exception as error:
            if isinstance(error, Failed) or not self.is_peer:
                raise
            raise Failed(one_line(f"{type(error).__name__}: {error}")) from error

    def close(self) -> None:
        self.contestant = None
