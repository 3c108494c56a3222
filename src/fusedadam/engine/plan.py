"""Everything about a step that stays the same until a tensor, a group or a flag changes.

A plan is made once and then used step after step. Making one is where all input is checked, states are created and
kernels compiled. It either succeeds or leaves everything as it was: all that may fail is prepared first, then what was
prepared is committed, which cannot fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.backend import Joined
from fusedadam.engine.changes.names import GRAD, NO_GRAD, PARAM
from fusedadam.engine.changes.snapshot import Slot, Snapshot, Tensors, prepare_loop
from fusedadam.engine.device_scalars import DeviceScalars
from fusedadam.engine.geometry import Floats, Int64s
from fusedadam.engine.host_scalars import HostScalars
from fusedadam.engine.launch import NO_AMP, Amp, Launches
from fusedadam.engine.launch_table import GRADS_ANYWHERE
from fusedadam.engine.member import Roles
from fusedadam.engine.participant import Participant, StateDict, check_step_counts, prepare_states
from fusedadam.engine.scalar_kernel import ScalarKernel
from fusedadam.engine.step_counts import HOST, Counts, StepCounts
from fusedadam.engine.unscaling import Unscaling
from fusedadam.formats.tensors import join_low
from fusedadam.rules.rule import HyperParameters, Rule
from fusedadam.tensors.complex_numbers import resolved_parts
from fusedadam.tensors.shards import distributed_like, is_dtensor, local, sharding_of

States: TypeAlias = dict[Any, StateDict]
LARGEST_NUMBER = (1 << 31) - 1  # of a step that a kernel is handed


class Replaced(Exception):
    """Another thread took a state away while a plan was made for it."""


class Repeated(NamedTuple):
    """What a step runs that differs from the last one in numbers and addresses alone."""

    options: Sequence[HyperParameters]
    is_scaled: bool
    run: Joined
    kernels: Sequence[ScalarKernel | DeviceScalars]
    live: Sequence[ScalarKernel | DeviceScalars]  # they read tensors of the user's, which may be elsewhere by now

    def serves(self, options: Sequence[HyperParameters], amp: Amp) -> bool:
        if self.is_scaled != (amp is not NO_AMP):
            return False
        for kernel in self.live if options is self.options else self.kernels:  # noqa: SIM110  faster than all()
            if not kernel.follow(options):
                return False
        return True


class Plan:
    """``on_device``: step counts and scalars are kept on the parameters' device, where the backend can do so.
    ``is_scaled``: its first step divides gradients by a GradScaler's scale. ``measures_norms``: its rules are
    specialized so."""

    def __init__(
        self,
        rule: Rule,
        participants: Sequence[Participant],
        params: list[Tensor],
        states: States,
        step_counts: StepCounts,
        on_device: bool,
        is_scaled: bool = False,
        measures_norms: bool = False,
    ) -> None:
        self.indices, self.measures_norms = [p.index for p in participants], measures_norms
        present = [p for p in participants if not p.is_absent]
        self._tracked = [p.index for p in present if not p.param.is_inference()]  # by autograd
        shardings = [sharding_of(param) for param in params if is_dtensor(param)]
        self.meshes = list(dict.fromkeys(sharding.mesh for sharding in shardings if sharding is not None))

        # prepare: this may fail, and changes nothing
        known = {param: dict(state) for param, state in [*states.items()]}  # copies: another thread may write there
        prepare_states(participants, known)
        members = [p.as_member() for p in participants]
        for p, member in zip(participants, members, strict=True):
            by_block = {n for n, array in p.arrays.items() if array is not None and array.by == "block"}
            if not p.is_absent:
                checks.alike(member.roles, by_block=by_block, shapes=p.factored_shapes)
        checks.no_shared_memory((role, tensor) for member in members for role, tensor in member.roles.items())
        if is_scaled:
            checks.unscalable([local(p.grad) for p in present if p.grad is not None])
        check_step_counts(known)
        prepare_loop()
        self.launches = Launches(members)
        counts = self._prepare_scalars(rule, participants, known, step_counts, on_device)

        # commit: this cannot fail
        for p in present:
            if p.joined is not None:
                join_low(local(p.param), local(p.joined))
            if p.fresh or p.stale:
                state = states[p.param]
                state.update({**p.state, **state, **p.fresh})  # whole, even if another thread has just taken it away
                for name in p.stale:
                    state.pop(name, None)
        for prepared in counts:
            step_counts.take(prepared, states)

        views = {owner: view for prepared in counts for owner, view in prepared.views.items()}
        self._take_snapshot(present, params, states, views)
        self._absent_roles = {k: member.roles for k, member in enumerate(members) if member.is_absent}

    def _prepare_scalars(
        self,
        rule: Rule,
        participants: Sequence[Participant],
        known: Mapping[Tensor, StateDict],
        step_counts: StepCounts,
        on_device: bool,
    ) -> list[Counts]:
        """Decides whose steps the host counts and whose the device does, and prepares the counts of each."""
        current = {param: state["step"] for param, state in known.items() if "step" in state}
        current |= {p.param: p.fresh["step"] for p in participants if "step" in p.fresh}
        owners = [p.param for p in participants]
        groups: Int64s = np.array([p.group for p in participants], dtype=np.int64)
        tables = [launch.table for launch in self.launches]
        counting = [table for table in tables if on_device and table.home != HOST and not table.is_absent]
        home_of = {owners[k]: table.home for table in counting for k in table.member_indices.tolist()}
        self._device_scalars, prepared = [], []
        for home in set(home_of.values()):  # all of a device at once: their counts are one tensor
            on_home = {owner: current[owner] for owner, its_home in home_of.items() if its_home == home}
            counts = step_counts.prepare(
                on_home, {o: s for o, s in current.items() if home_of.get(o, home) == home}, home
            )
            prepared.append(counts)
            for table in (t for t in counting if t.home == home):
                members = table.member_indices
                places = counts.places(owners[k] for k in members.tolist())
                table.scalars_on_device = True
                self._device_scalars.append(DeviceScalars(rule, table, counts.flat, places, groups[members]))
        hosted = [k for k, p in enumerate(participants) if p.param not in home_of and not p.is_absent]
        others = {owner: step for owner, step in current.items() if owner not in home_of}
        counts = step_counts.prepare({owners[k]: current[owners[k]] for k in hosted}, others, HOST)
        places = counts.places(owners[k] for k in hosted)
        absent = [k for k, p in enumerate(participants) if p.is_absent]
        self._host_scalars = HostScalars(
            rule, groups, np.array(hosted, dtype=np.int64), places, np.array(absent, dtype=np.int64)
        )
        self._last_options: Sequence[HyperParameters] | None = None
        self._repeated: Repeated | None = None
        self._scalar_kernels = [
            (table, ScalarKernel(table.backend.scalars, rule, table, None, slice(None), groups[table.member_indices]))
            for table in tables
            if table.home != HOST and not table.is_absent and not table.scalars_on_device and table.backend.scalars
        ]
        return [*prepared, counts]

    def _take_snapshot(
        self, present: Sequence[Participant], params: list[Tensor], states: States, views: Mapping[Tensor, Tensor]
    ) -> None:
        """Takes the snapshot that later steps are compared with. ``views``: step counts that were made anew."""
        states = dict(states)  # as they are now
        if any(p.param not in states for p in present):
            raise Replaced
        slots = _slots(present, params, states)
        by_index = {p.index: p for p in present}
        self.snapshot = Snapshot(slots, params, states, [_expected(slot, by_index, views) for slot in slots])
        at = {(slot.param, slot.what): k for k, slot in enumerate(slots)}
        names = {"param": PARAM, "grad": GRAD}
        slots_of = {p.index: {r: at[p.index, names.get(r, r)] for r in p.arrays} for p in present}
        self._slots_of = [slots_of.get(index, {}) for index in self.indices]
        self._unscaling = Unscaling(
            {slot: name for slots in slots_of.values() for name, slot in slots.items()},
            apart=[at[p.index, GRAD] for p in present if p.resolves_grad or p.has_wider_grad],
        )
        self._address_slots = [
            (table, np.array([[self._slots_of[k][name] for k in table.member_indices] for name in table.arrays]))
            for table in (launch.table for launch in self.launches)
            if not table.is_absent
        ]

    @property
    def is_hosted(self) -> bool:
        """Whether the host has to know if the step is taken."""
        return self._host_scalars.counts_any or any(
            launch.table.is_absent and launch.table.home == HOST for launch in self.launches
        )

    def check_grads_can_be_unscaled(self, tensors: Tensors) -> None:
        """For a step with a GradScaler's scale. ``tensors``: what the snapshot has found."""
        self._unscaling.check(tensors, self.snapshot.addresses)

    def place(self) -> None:
        """Takes the present addresses from the snapshot."""
        for table, slots in self._address_slots:
            table.place(self.snapshot.addresses[slots])

    def run(
        self,
        params: list[Tensor],
        tensors: Tensors,
        step_counts: StepCounts,
        options: Sequence[HyperParameters],
        amp: Amp,
    ) -> None:
        """``tensors``: what the snapshot has found, kept by the caller until this returns; ``options``: the
        hyper-parameters of each group."""
        if not len(self.launches):
            return
        next_steps = step_counts.next(self._host_scalars.places)
        repeated = self._repeated
        if repeated is not None and _fits_a_kernel(next_steps) and repeated.serves(options, amp):
            if repeated.options is not options:
                _, is_scaled, joined, kernels, live = repeated
                self._repeated = Repeated(options, is_scaled, joined, kernels, live)  # _replace takes a microsecond
            self._repeat(repeated.run, next_steps, params, step_counts, amp)
            if amp.grad_scale is not None:
                self._unscaling.finish(tensors, amp)
            return
        if self._host_scalars:
            self._set_host_scalars(next_steps, options)
        for scalars in self._device_scalars:
            scalars.update(options)

        def count() -> None:
            step_counts.set(self._host_scalars.places, next_steps)
            for scalars in self._device_scalars:
                scalars.count()

        self.launches.execute(self._roles(tensors), (), amp, count)
        self._increment_versions(params)
        if amp.grad_scale is not None:
            self._unscaling.finish(tensors, amp)
        self._repeated = self._prepare_to_repeat(options, amp)

    def _repeat(self, run: Joined, step: float, params: list[Tensor], step_counts: StepCounts, amp: Amp) -> None:
        """A step that differs from the last one in numbers and addresses alone: one command does all of it."""
        self.launches.set_amp(amp)
        self.launches.send()
        step_counts.set(self._host_scalars.places, step)
        table = self.launches[0].table
        run(int(step), table.grad_scale, table.found_inf)
        self._increment_versions(params)

    def _increment_versions(self, params: list[Tensor]) -> None:
        """As every in-place operation does, so that autograd refuses to go back through a graph that kept them."""
        if self.snapshot.increment_versions is not None:
            self.snapshot.increment_versions()
        else:
            torch.autograd.graph.increment_version([params[k] for k in self._tracked])

    def _prepare_to_repeat(self, options: Sequence[HyperParameters], amp: Amp) -> Repeated | None:
        """Joins everything that a step with these options runs, if it consists of kernels alone."""
        if self.launches.needs_tensors or not all(launch.table.scalars_on_device for launch in self.launches):
            return None
        kernels: list[ScalarKernel | DeviceScalars] = [kernel for _, kernel in self._scalar_kernels]
        kernels += self._device_scalars
        runs = [kernel.runs_for(options) for kernel in kernels]
        first, is_scaled = [run for own in runs for run in own or ()], amp is not NO_AMP
        joined = None if None in runs else self.launches.join(first, is_scaled)
        live = [kernel for kernel in kernels if kernel.has_live]
        return None if joined is None else Repeated(options, is_scaled, joined, kernels, live)

    def _set_host_scalars(self, steps: float | Floats, options: Sequence[HyperParameters]) -> None:
        """From a plan's second step on, the device computes scalars from the options and the number of the step: one
        launch takes less time than their computation and their way to the device. Not where other tables of powers
        would be needed in every step, as when a scheduler cycles the momentum."""
        last, self._last_options = self._last_options, options
        for table, kernel in self._scalar_kernels:
            known = last is not None and (options is last or not kernel.has_options or kernel.follow(options))
            table.scalars_on_device = known and _fits_a_kernel(steps) and kernel.update(options, int(steps))
        if any(not launch.table.scalars_on_device for launch in self.launches):
            self.launches.set_scalars(*self._host_scalars.of(steps, options))
            if self.launches.is_stochastic:
                self.launches.set_steps(self._host_scalars.by_member(steps))

    def _roles(self, tensors: Tensors) -> Sequence[Roles]:
        """The local tensors of each member, if a launch needs more than their addresses."""
        if not self.launches.needs_tensors:
            return ()
        return [
            _local_roles({role: tensors[slot] for role, slot in slots.items()}) or self._absent_roles[k]
            for k, slots in enumerate(self._slots_of)
        ]

    def report(self, name: str) -> dict[int, float]:
        """A value by tensor of the last step, by the parameter's index in the optimizer; waits for the device."""
        return {
            self.indices[member]: value
            for table, values in self.launches.report(name)
            for member, value, grads in zip(
                table.member_indices.tolist(), values.tolist(), table.value(GRADS_ANYWHERE).tolist(), strict=True
            )
            if grads
        }


def _fits_a_kernel(steps: float | Floats) -> TypeGuard[float]:
    """Whether all steps have the same number, and kernels can take it: an int32."""
    return isinstance(steps, float) and steps.is_integer() and abs(steps) <= LARGEST_NUMBER


def _local_roles(roles: Mapping[str, Any]) -> dict[str, Tensor]:
    """The local shard of each; a gradient that is sharded differently from its parameter is redistributed, and one that
    is lazily conjugated is resolved."""
    return {
        role: resolved_parts(local(distributed_like(whole, roles["param"]) if role == "grad" else whole))
        for role, whole in roles.items()
    }


def _slots(present: Sequence[Participant], params: list[Tensor], states: States) -> list[Slot]:
    """Everything that a step has to look at: of other parameters, that they still have no gradient."""
    order = {id(owner): k for k, owner in enumerate(states)}
    by_index = {p.index: p for p in present}
    slots: list[Slot] = []
    for k, param in enumerate(params):
        p = by_index.get(k)
        if p is None:
            slots.append(Slot(k, NO_GRAD))
            continue
        slots += [Slot(k, PARAM), Slot(k, GRAD)]
        slots += [Slot(k, name, order[id(param)]) for name in (*p.state_arrays, "step")]
    return slots


def _expected(slot: Slot, by_index: Mapping[int, Participant], views: Mapping[Tensor, Tensor]) -> Any:
    """The tensor that the plan was made for."""
    if slot.what == NO_GRAD:
        return None
    p = by_index[slot.param]
    if slot.what == "step":
        return views.get(p.param, p.state["step"])
    return p.state[slot.what] if isinstance(slot.what, str) else p.param if slot.what == PARAM else p.grad
