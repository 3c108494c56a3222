"""The scalars of a plan: who computes those of which members, and who counts their steps.

There are three kinds of launch tables:

1. On a CPU, and with the eager backend: the host counts steps and computes scalars.
2. On a device, usually (``by_kernel``): the host counts. It computes the scalars of the plan's first step; from the
   second on a kernel does, given the number of the step, which takes less time than computing and sending them.
3. Where only the device knows the step or an option (GradScaler, capturable, an lr on the device; ``on_device``): the
   device counts and computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
from torch import Tensor

from fusedadam.engine.backend import Joined
from fusedadam.engine.device_scalars import DeviceScalars
from fusedadam.engine.geometry import Floats, Int64s
from fusedadam.engine.launch import NO_AMP, Amp, Launches
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.participant import Participant, StateDict
from fusedadam.engine.step_counts import HOST, Counts, Places, StepCounts
from fusedadam.rules.rule import HyperParameters, Rule

Flags: TypeAlias = tuple[bool, ...]
LARGEST_NUMBER = (1 << 31) - 1  # of a step that a kernel is handed


class Options(NamedTuple):
    """Lists have one entry for each group. The revisions tell whether anything changed since an earlier step."""

    flags: list[Flags]
    hyper_parameters: list[HyperParameters]
    skips_nonfinite: bool  # in any group
    on_device: bool  # the host does not know, or may not ask, which step this is or what a scalar is
    structure_revision: int  # another number whenever flags, storage or backend of a group have changed
    revision: int  # another number whenever anything has changed


class HostScalars:
    """Computed in Python, once for each group and step.

    ``counted``: the members whose steps the host counts, at ``places`` of the counts; ``uncounted``: members that
    have no element here, but need scalars. ``groups`` has every member's group."""

    def __init__(self, rule: Rule, groups: Int64s, counted: Int64s, places: Places, uncounted: Int64s) -> None:
        self._rule, self._groups, self.places = rule, groups, places
        self._counted, self._uncounted, self.counts_any = counted, uncounted, len(counted) > 0
        # which groups have members that are counted or uncounted, and which of these each member is
        served = [*((k, True) for k in counted.tolist()), *((k, False) for k in uncounted.tolist())]
        kinds = [(int(groups[k]), is_counted) for k, is_counted in served]
        order = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        self._kinds, self._kind_of = list(order), np.zeros(len(groups), dtype=np.int64)
        self._kind_of[[k for k, _ in served]] = [order[kind] for kind in kinds]
        self._sets: list[tuple[dict[str, Any], bool]] = []
        self._sets_at: int | None = None  # the revision of the options that they are from

    def __bool__(self) -> bool:
        return self.counts_any or len(self._uncounted) > 0

    def of(self, steps: float | Floats, options: Options) -> tuple[list[Mapping[str, Any]], Int64s]:
        """The scalars of every (options, step) that occurs, and for each member which of them are its own. ``steps``:
        of all counted members, or of each."""
        if isinstance(steps, float):
            if self._sets_at != options.revision:
                self._make_sets(options)
            scalars = self._rule.scalars
            found = [scalars(step=steps if is_counted else 1.0, **values) for values, is_counted in self._sets]
            return found, self._kind_of
        return self._of_each(steps, options.hyper_parameters)

    def _of_each(self, steps: Floats, options: Sequence[HyperParameters]) -> tuple[list[Mapping[str, Any]], Int64s]:
        groups = self._groups[self._counted].tolist()
        keys = [(_numbers(options[group]), step) for group, step in zip(groups, steps.tolist(), strict=True)]
        keys += [(_numbers(options[self._groups[k]]), 1.0) for k in self._uncounted]
        scalars, order = self._rule.scalars_of(keys)
        set_of = np.zeros(len(self._groups), dtype=np.int64)
        set_of[np.concatenate([self._counted, self._uncounted])] = order
        return scalars, set_of

    def _make_sets(self, options: Options) -> None:
        """The hyper-parameters of each kind, with whether they are of members that are counted (without an element, any
        step will do). They serve until the options change, unless a tensor is among them, which may change in place."""
        of_group = options.hyper_parameters
        keys = [(_numbers(of_group[group]), counted) for group, counted in self._kinds]
        self._sets = [(dict(zip(self._rule.hyper_parameters, k, strict=True)), counted) for k, counted in keys]
        are_numbers = all(key[0] is of_group[kind[0]] for key, kind in zip(keys, self._kinds, strict=True))
        self._sets_at = options.revision if are_numbers else None

    def by_member(self, steps: float | Floats) -> Floats:
        """The step of each member; of those without an element, 0."""
        every = np.zeros(len(self._groups))
        every[self._counted] = steps
        return every


@dataclass
class FastPath:
    """On a device, never on a CPU: one function that runs the whole step, if only the number of the step, numbers among
    the options and addresses have changed."""

    revision: int  # of the options that the kernels have
    is_scaled: bool
    run: Joined
    kernels: Sequence[DeviceScalars]
    live: Sequence[DeviceScalars]  # those that read user tensors, which may have moved

    def serves(self, options: Options, amp: Amp) -> bool:
        """Whether a step with these options can take it; if so, the kernels have them."""
        if self.is_scaled != (amp is not NO_AMP):
            return False
        for kernel in self.live if options.revision == self.revision else self.kernels:
            if not kernel.follow(options.hyper_parameters):
                return False
        self.revision = options.revision
        return True


class Scalars:
    """``by_kernel``: the tables of the second kind; ``on_device``: those of the third."""

    def __init__(
        self,
        launches: Launches,
        host: HostScalars,
        on_device: Sequence[DeviceScalars],
        by_kernel: Sequence[tuple[LaunchTable, DeviceScalars]],
    ) -> None:
        self._launches, self._host, self._on_device, self._by_kernel = launches, host, on_device, by_kernel
        self._last: int | None = None  # the revision of the last step's options
        self._fast_path: FastPath | None = None

    @property
    def places(self) -> Places:
        """Where the counts are that the host increments."""
        return self._host.places

    @property
    def are_hosted(self) -> bool:
        """Whether the host must read ``found_inf`` before the step, because it counts steps itself."""
        return self._host.counts_any

    def fast_path(self, steps: float | Floats, options: Options, amp: Amp) -> Joined | None:
        """The fast path, if this step can take it."""
        known = self._fast_path
        if known is None or not fits_a_kernel(steps) or not known.serves(options, amp):
            return None
        return known.run

    def set(self, steps: float | Floats, options: Options) -> None:
        """Writes the scalars of the next step into the tables. ``steps``: the number of that step."""
        if self._host:
            self._set_hosted(steps, options)
        for scalars in self._on_device:
            scalars.update(options.hyper_parameters)

    def _set_hosted(self, steps: float | Floats, options: Options) -> None:
        """By the host, or by kernels from the second step on. Not where other tables of powers would be needed in
        every step, as when a scheduler cycles the momentum."""
        last, self._last = self._last, options.revision
        for table, kernel in self._by_kernel:
            now = options.hyper_parameters
            known = last is not None and (last == options.revision or not kernel.has_options or kernel.follow(now))
            table.scalars_on_device = False  # until it has them
            if known and fits_a_kernel(steps):
                kernel.update(now, int(steps))
                table.scalars_on_device = True
        if self._launches.need_host_scalars:
            self._launches.set_scalars(*self._host.of(steps, options))
            if self._launches.is_stochastic:
                self._launches.set_steps(self._host.by_member(steps))

    def count(self) -> None:
        """Counts the step where the device does."""
        for scalars in self._on_device:
            scalars.count()

    def prepare_fast_path(self, options: Options, amp: Amp) -> None:
        """Joins everything that a step with these options runs, if it consists of kernels alone."""
        kernels = [*(kernel for _, kernel in self._by_kernel), *self._on_device]
        self._fast_path = None
        if not kernels or self._launches.needs_tensors or self._launches.need_host_scalars:
            return
        runs = [kernel.runs_for(options.hyper_parameters) for kernel in kernels]
        first, is_scaled = [run for own in runs for run in own or ()], amp is not NO_AMP
        joined = None if None in runs else self._launches.join(first, is_scaled)
        if joined is not None:
            live = [kernel for kernel in kernels if kernel.has_live]
            self._fast_path = FastPath(options.revision, is_scaled, joined, kernels, live)


def prepare_scalars(
    rule: Rule,
    participants: Sequence[Participant],
    known: Mapping[Tensor, StateDict],
    launches: Launches,
    step_counts: StepCounts,
    on_device: bool,
) -> tuple[Scalars, list[Counts]]:
    """Decides whose steps the host counts and whose the device does, and prepares the counts of each; changes nothing
    but the new tables. ``on_device``: the device counts, where the backend can."""
    current = {param: state["step"] for param, state in known.items() if "step" in state}
    current |= {p.param: p.fresh["step"] for p in participants if "step" in p.fresh}
    owners = [p.param for p in participants]
    groups: Int64s = np.array([p.group for p in participants], dtype=np.int64)
    tables = [launch.table for launch in launches if launch.table.home != HOST and not launch.table.is_absent]
    counting = tables if on_device else []
    home_of = {owners[k]: table.home for table in counting for k in table.member_indices.tolist()}
    counted: list[Counts] = []
    device_scalars: list[DeviceScalars] = []
    for home in set(home_of.values()):  # all of a device at once: their counts are one tensor
        on_home = {owner: current[owner] for owner, its_home in home_of.items() if its_home == home}
        others = {owner: step for owner, step in current.items() if home_of.get(owner, home) == home}
        counts = step_counts.prepare(on_home, others, home)
        counted.append(counts)
        for table in (t for t in counting if t.home == home):
            members = table.member_indices
            places = counts.places(owners[k] for k in members.tolist())
            table.scalars_on_device = True
            device_scalars.append(DeviceScalars(rule, table, counts.flat, places, groups[members]))
    hosted = [k for k, p in enumerate(participants) if p.param not in home_of and not p.is_absent]
    others = {owner: step for owner, step in current.items() if owner not in home_of}
    counts = step_counts.prepare({owners[k]: current[owners[k]] for k in hosted}, others, HOST)
    places = counts.places(owners[k] for k in hosted)
    absent = [k for k, p in enumerate(participants) if p.is_absent]
    host = HostScalars(rule, groups, np.array(hosted, dtype=np.int64), places, np.array(absent, dtype=np.int64))
    by_kernel = [
        (table, DeviceScalars(rule, table, None, slice(None), groups[table.member_indices]))
        for table in tables
        if not table.scalars_on_device
    ]
    return Scalars(launches, host, device_scalars, by_kernel), [*counted, counts]


def fits_a_kernel(steps: float | Floats) -> TypeGuard[float]:
    """Whether all steps have the same number, and kernels can take it: an int32."""
    return isinstance(steps, float) and steps.is_integer() and abs(steps) <= LARGEST_NUMBER


def _numbers(options: HyperParameters) -> HyperParameters:
    """The same tuple, if no tensor is among them."""
    for value in options:
        if isinstance(value, Tensor):
            return tuple([float(v) if isinstance(v, Tensor) else v for v in options])
    return options
