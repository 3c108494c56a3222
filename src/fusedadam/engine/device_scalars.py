"""Scalars on the device by one kernel for all members of a table, and another kernel that counts the step.

The kernel reads three tensors:

- ``counts``: the step counts, in float32;
- ``members``: for each member its column of the table, the position of its count, and the offset of its group's words
  in ``options``;
- ``options``: the words of each group, then the tables of powers (counts.py). The words of a group are, for each
  argument of the program, a number in float64 or the address of a tensor; then the kind of each argument; then, for
  each power, the offset of its table in ``options``.

Numbers that change from step to step, as with a scheduler, are sent; nothing is compiled again. Where the host counts
and there are few groups, their learning rates are arguments of the kernel, and not even sent. Tensors are read by the
kernel, in replays of a CUDA graph as well.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.backend import Action, EvaluateScalars, Kinds, ScalarLaunch
from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.step_counts import Places
from fusedadam.rules.counts import SIZES, recent_powers
from fusedadam.rules.rule import HyperParameters, Rule
from fusedadam.rules.scalar_program import ScalarProgram
from fusedadam.tensors.layout import is_plain
from fusedadam.tensors.transfer import keep_for_graph, outside_inference_mode, sent, update

# What an argument is to the kernel: a number, or the address of a number of this dtype. A tensor of another dtype, or
# on another device, is converted by torch in every step.
NUMBER, AT_F32, AT_F64 = range(3)
READABLE = (Tensor, torch.nn.Parameter)  # other classes may keep their numbers elsewhere
TABLE_SIZE = sum(SIZES)
PASSED, MOST_PASSED = "lr", 4  # what schedulers change, and in how many groups it may be an argument of the kernel
KIND_OF_DTYPE = {torch.float32: AT_F32, torch.float64: AT_F64}

Strings: TypeAlias = tuple[tuple[str, str], ...]


class Live(NamedTuple):
    """A tensor that the user may change in place, and what the kernel was told about it."""

    tensor: Tensor
    address: int
    dtype: torch.dtype

    def is_as_before(self) -> bool:
        tensor, address, dtype = self
        return tensor.data_ptr() == address and tensor.dtype == dtype and not tensor.is_neg()


class Converted(NamedTuple):
    """A tensor that the kernel cannot read, and the float64 on the table's device that it is copied to."""

    tensor: Tensor
    number: Tensor

    def update(self) -> None:
        self.number.copy_(self.tensor.detach().reshape(()), non_blocking=True)


class Part(NamedTuple):
    """The groups that one program serves, and its launch."""

    groups: tuple[int, ...]
    launch: ScalarLaunch
    run: EvaluateScalars
    words: Int64s  # the options as they were sent last
    free: frozenset[int]  # the positions of hyper-parameters that may change alone
    arguments: tuple[int, ...]  # the positions of those that the program reads
    passed: int | None  # the position of the one that is an argument of the kernel

    def changes(self, options: Sequence[HyperParameters], seen: Sequence[HyperParameters]) -> set[int] | None:
        """The positions of the numbers in which ``options`` differ from ``seen``; None if they differ in more, or in
        the base of a table of powers."""
        found: set[int] = set()
        for group in self.groups:
            now, before = options[group], seen[group]
            if now is before:
                continue
            for k in itertools.compress(range(len(now)), map(operator.is_not, now, before)):
                if k not in self.free or type(now[k]) is not float or type(before[k]) is not float:
                    return None
                found.add(k)
        return found

    def take(self, options: Sequence[HyperParameters], changed: set[int]) -> None:
        """Takes the numbers at these positions to the kernel."""
        if self.passed is not None:
            at = self.passed
            self.run.set_passed([options[group][at] for group in self.groups])
            if changed <= {at}:
                return
        program = self.launch.program
        packed, width = _numbers(len(program.arguments)), _width(program)
        for n, group in enumerate(self.groups):
            packed.pack_into(self.words.data, 8 * width * n, *[options[group][k] for k in self.arguments])
        _send(self.words, self.launch.options, width * len(self.groups))


class DeviceScalars:
    """``places`` are the positions of the members' counts in ``flat``; ``groups`` are the members' groups. Without
    ``flat``, the host counts: all members have the same step."""

    def __init__(self, rule: Rule, table: LaunchTable, flat: Tensor | None, places: Places, groups: Int64s) -> None:
        kernels = table.backend.scalars
        assert kernels is not None  # only tables on the host do without
        self._evaluate, self._rule, self._table, self._flat = kernels.evaluate, rule, table, flat
        self._places: Int64s = np.arange(len(groups) if flat is None else len(flat))[places]
        self._groups, self._distinct_groups = groups, list(dict.fromkeys(groups.tolist()))
        counting = [] if flat is None else [kernels.count_steps(table, flat, sent(self._places, table.home))]
        self._counting: list[Action] = counting
        self._seen: Sequence[HyperParameters] | None = None  # the options that the parts have
        self._live: dict[int, Live] = {}  # by the tensor's id
        self._converted: dict[int, Converted] = {}
        self._parts: dict[Strings, Part] = {}
        self._runs: list[EvaluateScalars] = []

    def update(self, options: Sequence[HyperParameters], step: int = 0) -> None:
        """Writes the scalars of the next step into the table. ``step``: its number, where the host counts."""
        if not self._is_current(options):
            self._take(options)
        for converted in self._converted.values():
            converted.update()
        for run in self._runs:
            run(step)

    def count(self) -> None:
        """Counts the step, unless GradScaler found an infinity."""
        for count in self._counting:
            count()

    @property
    def has_live(self) -> bool:
        return bool(self._live)

    @property
    def has_options(self) -> bool:
        """Whether it has been given any yet."""
        return self._seen is not None

    def follow(self, options: Sequence[HyperParameters]) -> bool:
        """Whether ``update`` and ``count`` run the same with these options; numbers that have changed are sent."""
        if self._converted:
            return False
        if self._is_current(options):
            return True
        seen, parts = self._seen, self._parts.values()
        if seen is None or len(seen) != len(options):
            return False
        if self._live and not all(live.is_as_before() for live in self._live.values()):
            return False
        changes = [part.changes(options, seen) for part in parts]
        if None in changes:
            return False
        self._seen = None  # until everything has been sent: an interrupt may come at any time
        for part, changed in zip(parts, changes, strict=True):
            part.take(options, changed or set())
        self._seen = options
        return True

    def runs_for(self, options: Sequence[HyperParameters]) -> list[Callable[..., None]] | None:
        """What ``update`` and ``count`` run, if they run nothing else with these options."""
        return None if self._converted or not self._is_current(options) else [*self._runs, *self._counting]

    def _is_current(self, options: Sequence[HyperParameters]) -> bool:
        if options is not self._seen and (self._seen is None or not _same_objects(options, self._seen)):
            return False
        return not self._live or all(live.is_as_before() for live in self._live.values())

    def _take(self, options: Sequence[HyperParameters]) -> None:
        """Sends the options to the device, and compiles a kernel if they need another."""
        self._seen = None  # until everything has been sent: an interrupt may come at any time
        names = self._rule.hyper_parameters
        by_group = {group: dict(zip(names, options[group], strict=True)) for group in self._distinct_groups}
        by_strings: dict[Strings, list[int]] = {}
        for group, values in by_group.items():
            strings = tuple((name, value) for name, value in values.items() if isinstance(value, str))
            by_strings.setdefault(strings, []).append(group)
        programs = {strings: self._rule.scalar_program(strings) for strings in by_strings}
        self._live, self._converted, parts = {}, {}, {}
        for strings, groups in by_strings.items():
            own = [by_group[group] for group in groups]
            parts[strings] = self._part(strings, programs[strings], tuple(groups), own)
        self._parts = parts
        self._runs = [part.run for part in parts.values()]
        self._seen = options

    def _part(
        self, strings: Strings, program: ScalarProgram, groups: tuple[int, ...], options: Sequence[Mapping[str, Any]]
    ) -> Part:
        words, kinds = self._words(program, options)
        last = self._parts.get(strings)
        before = None if last is None else (last.groups, last.launch.kinds, last.launch.options.shape)
        if last is not None and before == (groups, kinds, words.shape):
            _send(words, last.launch.options, len(words))
            if last.passed is not None:
                last.run.set_passed([own[PASSED] for own in options])
            return last._replace(words=words)
        columns = np.flatnonzero(np.isin(self._groups, groups))
        width = _width(program)
        offsets = [width * groups.index(group) for group in self._groups[columns].tolist()]
        with outside_inference_mode():  # the words are written again in later steps
            members = sent(np.array([columns, self._places[columns], offsets], dtype=np.int64), self._table.home)
            there = sent(words.copy(), self._table.home)
            place = {name: k for k, name in enumerate(self._rule.hyper_parameters)}
            arguments = tuple([place[name] for name in program.arguments])
            of_tables = {place[name] for power in program.powers for name in power.reads}
            are_numbers = all(own == (NUMBER,) for own in kinds)  # where a group has a tensor, no number changes alone
            free = frozenset(arguments) - of_tables if are_numbers else frozenset()
            passes = self._flat is None and place.get(PASSED) in free and len(groups) <= MOST_PASSED
            passed = [(PASSED, group) for group in range(len(groups))] if passes else []
            launch = ScalarLaunch(self._table, program, kinds, self._flat, members, there, passed)
            run = self._evaluate(launch)
            if passes:
                run.set_passed([own[PASSED] for own in options])
            return Part(groups, launch, run, words, free, arguments, place[PASSED] if passes else None)

    def _words(self, program: ScalarProgram, options: Sequence[Mapping[str, Any]]) -> tuple[Int64s, Kinds]:
        """``options`` as the kernel reads them, and the kinds of each argument."""
        arguments, width = program.arguments, _width(program)
        tables: dict[float, int] = {}  # the offset of the table of each base, in their order
        rows, kinds_of = [], []
        for own in options:
            values = [own[name] for name in arguments]
            kinds = [NUMBER] * len(values)
            for k, value in enumerate(values):
                if isinstance(value, Tensor):
                    values[k], kinds[k] = self._address_of(value)
            offsets = (
                tables.setdefault(power.base(own), width * len(options) + TABLE_SIZE * len(tables))
                for power in program.powers
            )
            rows.append(struct.pack(_format(tuple(kinds), len(program.powers)), *values, *kinds, *offsets))
            kinds_of.append(kinds)
        rows += (recent_powers(base).table.tobytes() for base in tables)
        words = bytearray().join(rows)  # which, unlike bytes, torch takes without a warning
        return np.frombuffer(words, dtype=np.int64), tuple(
            tuple(sorted({*kinds})) for kinds in zip(*kinds_of, strict=True)
        )

    def _address_of(self, value: Tensor) -> tuple[int, int]:
        """Where the kernel finds the number of a tensor, and of which kind it is."""
        kind = KIND_OF_DTYPE.get(value.dtype)
        if kind is not None and value.device == self._table.home and is_plain(value) and type(value) in READABLE:
            self._live[id(value)] = Live(value, value.data_ptr(), value.dtype)
            return value.data_ptr(), kind
        if id(value) not in self._converted:
            with outside_inference_mode():  # it is written again in later steps
                number = keep_for_graph(torch.zeros((), dtype=torch.float64, device=self._table.home))
            self._converted[id(value)] = Converted(value, number)
        return self._converted[id(value)].number.data_ptr(), AT_F64


def _same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _width(program: ScalarProgram) -> int:
    """The words of a group."""
    return 2 * len(program.arguments) + len(program.powers)


@functools.cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"{count}d")


@functools.cache
def _format(kinds: tuple[int, ...], powers: int) -> str:
    """The words of a group, for ``struct``."""
    return "".join("d" if kind == NUMBER else "q" for kind in kinds) + "q" * (len(kinds) + powers)


def _send(words: Int64s, there: Tensor, count: int) -> None:
    """The first ``count`` words."""
    if there.device.type == "cpu":
        there.numpy()[:count] = words[:count]
    else:
        update(there, words, slice(0, count))
