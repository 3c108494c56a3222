"""Everything about a step that stays the same until a tensor, a group or a flag changes.

A plan is made once and then used step after step. Making one is where all input is checked, states are created and
kernels compiled. It either succeeds or leaves everything as it was: ``prepare_plan`` does all that may fail and changes
nothing; ``commit`` writes what was prepared, and cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from fusedadam import checks
from fusedadam.engine.changes.names import GRAD, NO_GRAD, PARAM
from fusedadam.engine.changes.snapshot import Slot, Snapshot, Tensors, prepare_loop
from fusedadam.engine.launch import Amp, Launches, PlacedLaunches, increment_versions
from fusedadam.engine.member import Roles
from fusedadam.engine.participant import Participant, StateDict, check_step_counts, prepare_states
from fusedadam.engine.presence import Presence, presences
from fusedadam.engine.scalars import Options, Scalars, prepare_scalars
from fusedadam.engine.step_counts import HOST, Counts, StepCounts
from fusedadam.engine.unscaling import Unscaling
from fusedadam.formats.tensors import join_low
from fusedadam.rules.rule import Rule
from fusedadam.tensors.complex_numbers import resolved_parts
from fusedadam.tensors.host_memory import slabs_of
from fusedadam.tensors.shards import distributed_like, is_dtensor, local, sharding_of

States: TypeAlias = dict[Any, StateDict]


class Replaced(Exception):
    """Another thread took a state away while a plan was made for it."""


class Plan(PlacedLaunches):
    """What ``commit`` makes. A step compares the snapshot, takes new addresses with ``place``, and calls ``run``."""

    def __init__(self, prepared: PreparedPlan, snapshot: Snapshot, measures_norms: bool) -> None:
        present, at = prepared.present, {(slot.param, slot.what): k for k, slot in enumerate(snapshot.slots)}
        slots_of = {p.index: {r: at[p.index, _KINDS.get(r, r)] for r in p.arrays} for p in present}
        self.indices = [p.index for p in prepared.participants]
        super().__init__(prepared.launches, snapshot, [slots_of.get(index, {}) for index in self.indices])
        self.measures_norms = measures_norms  # its rules were specialized to measure norms
        # kept alive as long as the tables have addresses in them
        self.slabs = slabs_of(p.state[name] for p in present for name in p.hosted)
        self.meshes, self.presences = prepared.meshes, prepared.presences
        self._scalars = prepared.scalars
        # parameters whose version counter autograd tracks
        self._tracked = [p.index for p in present if not p.param.is_inference()]
        self._absent_roles = prepared.absent_roles
        self._unscaling = Unscaling(
            {slot: name for slots in slots_of.values() for name, slot in slots.items()},
            apart=[at[p.index, GRAD] for p in present if p.resolves_grad or p.has_wider_grad],
        )

    @property
    def is_hosted(self) -> bool:
        """Whether the host must read ``found_inf`` before the step, because it counts steps itself."""
        return self._scalars.are_hosted or any(
            launch.table.is_absent and launch.table.home == HOST for launch in self.launches
        )

    def check_grads_can_be_unscaled(self, tensors: Tensors) -> None:
        """For a step with a GradScaler's scale. ``tensors``: what the snapshot has found."""
        self._unscaling.check(tensors, self.snapshot.addresses)

    def run(
        self, params: Sequence[Tensor], tensors: Tensors, step_counts: StepCounts, options: Options, amp: Amp
    ) -> None:
        """One step: scalars, counts, launches. ``tensors``: what the snapshot has found, kept by the caller until this
        returns."""
        if not len(self.launches):
            return
        scalars, launches = self._scalars, self.launches
        for slab, _ in self.slabs:
            slab.mark_used()
        steps = step_counts.next(scalars.places)
        run_all = scalars.fast_path(steps, options, amp)
        if run_all is not None:
            launches.set_amp(amp)
            launches.send()
            step_counts.set(scalars.places, steps)
            first = launches[0].table
            run_all(int(steps), first.grad_scale, first.found_inf)
        else:
            scalars.set(steps, options)

            def count() -> None:
                step_counts.set(scalars.places, steps)
                scalars.count()

            launches.execute(self._roles(tensors), amp, count)
            scalars.prepare_fast_path(options, amp)
        self._increment_versions(params)
        if amp.grad_scale is not None:
            self._unscaling.finish(tensors, amp)

    def _increment_versions(self, params: Sequence[Tensor]) -> None:
        if self.snapshot.increment_versions is not None:
            self.snapshot.increment_versions()
        else:
            increment_versions([params[k] for k in self._tracked])

    def _roles(self, tensors: Tensors) -> Sequence[Roles]:
        """The local tensors of each member, if a launch needs more than their addresses."""
        if not self.launches.needs_tensors:
            return ()
        return [
            _local_roles({role: tensors[slot] for role, slot in slots.items()}) or self._absent_roles[k]
            for k, slots in enumerate(self.slots_of)
        ]


@dataclass
class PreparedPlan:
    """Everything that ``commit`` still has to write; all that may fail has been done."""

    participants: Sequence[Participant]
    params: list[Tensor]
    launches: Launches
    scalars: Scalars
    counts: list[Counts]
    presences: list[Presence]
    absent_roles: Mapping[int, Roles]

    @property
    def present(self) -> list[Participant]:
        return [p for p in self.participants if not p.is_absent]

    @property
    def meshes(self) -> list[Any]:
        shardings = [sharding_of(param) for param in self.params if is_dtensor(param)]
        return list(dict.fromkeys(sharding.mesh for sharding in shardings if sharding is not None))

    def commit(self, states: States, step_counts: StepCounts, measures_norms: bool = False) -> Plan:
        """Writes states and step counts, and takes the snapshot that later steps are compared with. Nothing fails here
        but for Replaced, if another thread has taken a state away."""
        for p in self.present:
            if p.joined is not None:
                join_low(local(p.param), local(p.joined))
            if p.fresh or p.stale:
                state = states[p.param]
                state.update({**p.state, **state, **p.fresh})  # all keys: another thread may have removed some
                for name in p.stale:
                    state.pop(name, None)
        for counts in self.counts:
            step_counts.take(counts, states)
        states = dict(states)  # as they are now
        if any(p.param not in states for p in self.present):
            raise Replaced
        views = {owner: view for counts in self.counts for owner, view in counts.views.items()}
        found = list(_slots({p.index: p for p in self.present}, self.params, states, views))
        slots, expected = [slot for slot, _ in found], [tensor for _, tensor in found]
        return Plan(self, Snapshot(slots, self.params, states, expected), measures_norms)


def prepare_plan(
    rule: Rule,
    participants: Sequence[Participant],
    params: list[Tensor],
    states: States,
    step_counts: StepCounts,
    on_device: bool,
    is_scaled: bool = False,
) -> PreparedPlan:
    """Checks everything, makes new states and compiles kernels; changes nothing that a user can see.

    ``on_device``: step counts and scalars are kept on the parameters' device, where the backend can do so.
    ``is_scaled``: the plan's first step divides gradients by a GradScaler's scale.
    """
    found = dict(states)  # copies: another thread may write there
    known = {param: dict(found[param]) for param in params if param in found}
    prepare_states(participants, known)
    members = [p.as_member() for p in participants]
    for p, member in zip(participants, members, strict=True):
        if not p.is_absent:
            checks.alike(member.roles, shapes=p.smaller_shapes, hosted=p.hosted)
    checks.no_shared_memory((role, tensor) for member in members for role, tensor in member.roles.items())
    if is_scaled:
        checks.unscalable([local(p.grad) for p in participants if p.grad is not None])
    check_step_counts(known)
    prepare_loop()
    launches = Launches(members)
    absent_roles = {k: member.roles for k, member in enumerate(members) if member.is_absent}
    presence_checks = presences(participants)
    scalars, counts = prepare_scalars(rule, participants, known, launches, step_counts, on_device)
    return PreparedPlan(participants, params, launches, scalars, counts, presence_checks, absent_roles)


_KINDS: Mapping[str, int] = {"param": PARAM, "grad": GRAD}


def _slots(
    present: Mapping[int, Participant], params: list[Tensor], states: States, views: Mapping[Tensor, Tensor]
) -> Iterable[tuple[Slot, Any]]:
    """Everything that a step has to look at, with the tensor that the plan was made for: of parameters without a
    gradient, only that this has not changed. ``views``: step counts that were made anew."""
    order = {id(owner): k for k, owner in enumerate(states)}
    for k, param in enumerate(params):
        p = present.get(k)
        if p is None:
            yield Slot(k, NO_GRAD), None
            continue
        yield Slot(k, PARAM), param
        yield Slot(k, GRAD), p.grad
        hosted = {*p.hosted}
        yield from ((Slot(k, name, order[id(param)], name in hosted), p.state[name]) for name in p.state_arrays)
        yield Slot(k, "step", order[id(param)]), views.get(param, p.state["step"])


def _local_roles(roles: Mapping[str, Any]) -> dict[str, Tensor]:
    """The local shard of each; a gradient that is sharded differently from its parameter is redistributed, and one that
    is lazily conjugated is resolved."""
    return {
        role: resolved_parts(local(distributed_like(whole, roles["param"]) if role == "grad" else whole))
        for role, whole in roles.items()
    }
