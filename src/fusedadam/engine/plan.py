"""Everything about a step that stays the same until a tensor, a group or a flag changes.

A plan is made once and then used step after step. Making one is where all input is checked, states are created and
kernels compiled. It either succeeds or leaves everything as it was: all that may fail is prepared first, then what was
prepared is committed, which cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.backend import Backend
from fusedadam.engine.device_scalars import DeviceScalars
from fusedadam.engine.launch import Amp, Launches
from fusedadam.engine.launch_table import Floats, Int64s, Roles
from fusedadam.engine.snapshot import GRAD, NO_GRAD, PARAM, Slot, Snapshot, Tensors, prepare_loop
from fusedadam.engine.step_counts import HOST, Counts, StepCounts
from fusedadam.rules.rule import Options, Rule, SpecializedRule
from fusedadam.tensors.layout import copy_with, dense_strides, is_plain, lies_as
from fusedadam.tensors.shards import distributed_like, is_dtensor, lies_like, local, sharding_of, with_local
from fusedadam.tensors.transfer import capturing

States: TypeAlias = dict[Any, dict[str, Any]]


class Replaced(Exception):
    """Another thread has taken a state away while a plan was made for it."""


@dataclass
class Member:
    """A parameter that takes part in the step.

    One that is divided among processes, and whose sums the others wait for, does so even if it has no gradient here.
    """

    param: Tensor
    grad: Tensor | None  # as it was when the plan was begun; another thread may replace it at any time
    position: int  # among all parameters of the optimizer
    group: int
    special: SpecializedRule
    backend: Backend
    new_state: Callable[[str], Tensor]  # makes a state of that name as it is at the beginning

    @property
    def is_absent(self) -> bool:
        return self.grad is None


class Plan:
    """``on_device``: step counts and scalars are to be kept where the parameters are, if their backend can do so."""

    def __init__(
        self,
        rule: Rule,
        members: Sequence[Member],
        params: list[Tensor],
        states: States,
        steps: StepCounts,
        on_device: bool,
    ) -> None:
        self.rule = rule
        for member in members:
            checks.written("param", member.param)
            if not member.is_absent:
                checks.tensor("grad", member.grad)
                checks.both_divided("grad", member.grad, member.param)
        shardings = [sharding_of(param) for param in params if is_dtensor(param)]
        self.meshes = list(dict.fromkeys(sharding.mesh for sharding in shardings if sharding is not None))
        known = {param: dict(state) for param, state in states.items()}  # another thread may write there, too
        fresh = [{} if m.is_absent else _missing(m, known.get(m.param, {})) for m in members]
        if capturing() and any(fresh):
            raise RuntimeError(
                "step() is being captured in a CUDA graph, and would make new states, which every replay would empty; "
                "take a step, with the same parameters and options, before the capture"
            )
        roles = [_roles(m, {**known.get(m.param, {}), **new}) for m, new in zip(members, fresh, strict=True)]
        for own in roles:
            checks.alike(own)
        checks.no_shared_memory((role, tensor) for own in roles for role, tensor in own.items())
        for state in known.values():
            checks.one_number("state 'step'", state.get("step", 0.0))
            if state and "step" not in state:
                raise RuntimeError("a state has moments but no 'step': how often was it updated? Load it with its step")
        prepare_loop()
        groups = [m.group for m in members]
        self._absent = [k for k, m in enumerate(members) if m.is_absent]
        self.launches = Launches(
            [m.special for m in members], roles, [m.backend for m in members], groups,
            wholes=[m.param for m in members], absent=self._absent,
            passing=[k for k, m in enumerate(members) if not m.is_absent and not lies_like(m.grad, m.param)],
        )  # fmt: skip

        here = [m for m in members if not m.is_absent]
        self._tracked = [m.position for m in here if not m.param.is_inference()]
        self.groups: Int64s = np.array(groups, dtype=np.int64)
        self.positions = [m.position for m in members]
        present = {param: state["step"] for param, state in known.items() if "step" in state}
        present |= {m.param: new["step"] for m, new in zip(members, fresh, strict=True) if "step" in new}
        counts = self._prepare_counts(steps, [m.param for m in members], present, on_device)

        # nothing can fail from here on, so now it may be written
        for member, new in zip(members, fresh, strict=True):
            if new:
                states[member.param].update(new)
        for one in counts:
            steps.take(one, states)

        states = dict(states)  # from here on as they are now
        if any(m.param not in states for m in here):
            raise Replaced
        slots = _slots(here, params, states)
        used = {m.position: (m, {**known.get(m.param, {}), **new}) for m, new in zip(members, fresh, strict=True)}
        used_steps = {owner: view for one in counts for owner, view in one.views.items()}
        self.snapshot = Snapshot(slots, params, states, [_expected(slot, used, used_steps) for slot in slots])
        at = {(s.param, s.what): k for k, s in enumerate(slots)}
        names = {"param": PARAM, "grad": GRAD}
        self._at = [
            {} if m.is_absent else {r: at[m.position, names.get(r, r)] for r in m.special.roles} for m in members
        ]
        self._nothing = {k: roles[k] for k in self._absent}
        self._places = [
            (
                launch.table,
                np.array([[self._at[k][r] for k in launch.table.members] for r in launch.table.special.roles]),
            )
            for launch in self.launches
            if not launch.table.is_absent
        ]

    def _prepare_counts(
        self, steps: StepCounts, owners: list[Tensor], present: Mapping[Tensor, Any], on_device: bool
    ) -> list[Counts]:
        """Divides the parameters into those that are counted on the host and those whose device does it."""
        tables = [launch.table for launch in self.launches]
        away = [table for table in tables if on_device and table.home != HOST and not table.is_absent]
        self._away, prepared = [], []
        home_of = {owners[k]: table.home for table in away for k in table.members.tolist()}
        for home in set(home_of.values()):  # all of a device at once: their counts are one tensor
            there = {owner: present[owner] for owner, its_home in home_of.items() if its_home == home}
            counts = steps.prepare(there, {o: s for o, s in present.items() if home_of.get(o, home) == home}, home)
            prepared.append(counts)
            for table in (t for t in away if t.home == home):
                places = counts.places(owners[k] for k in table.members.tolist())
                table.scalars_on_device = True
                self._away.append(DeviceScalars(self.rule, table, counts.flat, places, self.groups[table.members]))
        elsewhere = {k for table in away for k in table.members.tolist()} | set(self._absent)
        self._hosted: Int64s = np.array([k for k in range(len(owners)) if k not in elsewhere], dtype=np.int64)
        hosted = [owners[k] for k in self._hosted.tolist()]
        others = {owner: step for owner, step in present.items() if owner not in home_of}
        counts = steps.prepare({owner: present[owner] for owner in hosted}, others, HOST)
        self._steps = counts.places(hosted)
        self._occurring, self._whose_group = np.unique(self.groups[self._hosted], return_inverse=True)
        return [*prepared, counts]

    @property
    def is_hosted(self) -> bool:
        """Whether the host has to know if the step is taken."""
        return len(self._hosted) > 0 or any(one.table.is_absent and one.table.home == HOST for one in self.launches)

    def place(self) -> None:
        """Takes the present addresses over from the snapshot."""
        for table, places in self._places:
            table.place(self.snapshot.addresses[places])

    def run(
        self, params: list[Tensor], tensors: Tensors, steps: StepCounts, options: Sequence[Options], amp: Amp
    ) -> None:
        """``tensors``: those that the snapshot has found, which the caller keeps until this returns; ``options``: the
        hyper-parameters of each group."""
        if not len(self.launches):
            return
        step = steps.next(self._steps)
        if len(self._hosted) or self._absent:
            self.launches.set_scalars(*self._scalars(step, options))
        for one in self._away:
            one.update(options)
        self.launches.set_amp(amp)

        def count() -> None:
            steps.set(self._steps, step)
            for one in self._away:
                one.count()

        roles: Sequence[Roles] = ()
        if self.launches.needs_tensors:
            wholes = [{role: tensors[k] for role, k in own.items()} for own in self._at]
            roles = [_parts(own) or self._nothing[k] for k, own in enumerate(wholes)]
        self.launches.run(roles, before_anything_is_written=count)
        # as every in-place operation does, so that autograd refuses to go back through a graph that kept them
        written = params if len(self._tracked) == len(params) else [params[k] for k in self._tracked]
        torch.autograd.graph.increment_version(written)

    def report(self, name: str) -> dict[int, float]:
        """A value by tensor of the last step, by the parameter's position in the optimizer; waits for the device."""
        return {
            self.positions[member]: value
            for table, values in self.launches.report(name)
            for member, value, joined in zip(
                table.members.tolist(), values.tolist(), table.value("_joined").tolist(), strict=True
            )
            if joined  # a gradient was there, here or on another process
        }

    def _scalars(self, step: Floats, options: Sequence[Options]) -> tuple[list[Mapping[str, Any]], Int64s]:
        """The scalars of every (options, step) that occurs, and which of them are whose."""
        options = [tuple(float(v) if isinstance(v, Tensor) else v for v in own) for own in options]
        if len(step) and step.min() == step.max():  # as good as always: one for each group
            keys, whose = [(options[group], float(step[0])) for group in self._occurring], self._whose_group
        else:
            groups = self.groups[self._hosted].tolist()
            keys = [(options[group], number) for group, number in zip(groups, step.tolist(), strict=True)]
            whose = np.arange(len(keys))
        counted = len(keys)
        keys = keys + [(options[self.groups[k]], 1.0) for k in self._absent]  # without an element, any step will do
        scalars, order = self.rule.scalars_of(keys)
        of_all = np.zeros(len(self.groups), dtype=np.int64)
        of_all[self._hosted] = np.array(order[:counted], dtype=np.int64)[whose]
        of_all[self._absent] = order[counted:]
        return scalars, of_all


def _missing(member: Member, state: Mapping[str, Any]) -> dict[str, Any]:
    """States that are not there yet, and those that no longer lie as the parameter does: it was moved or relaid."""
    param = local(member.param)
    strides, device = dense_strides(param, member.special.by_rows), param.device
    new: dict[str, Any] = {} if "step" in state else {"step": 0.0}
    for name in member.special.states:
        if name not in state:
            new[name] = member.new_state(name)
            continue
        checks.tensor(f"state {name!r}", state[name])
        if not lies_like(state[name], member.param):
            raise RuntimeError(
                f"state {name!r} is not divided among processes as its param is; set it with load_state_dict, or with "
                "torch.distributed.checkpoint"
            )
        own = local(state[name])
        if own.shape == param.shape and not (own.device == device and lies_as(own, strides) and is_plain(own)):
            new[name] = with_local(member.param, copy_with(own.to(device), strides))
    return new


def _roles(member: Member, state: Mapping[str, Any]) -> dict[str, Tensor]:
    here = local(member.param)
    if member.is_absent:
        return dict.fromkeys(member.special.roles, here.new_empty(0))
    grad: Any = member.grad
    if not lies_like(grad, member.param):  # each run divides it anew, together with the other processes: not yet
        grad = torch.empty_like(here, dtype=grad.dtype, device=grad.device)
    return {"param": here, "grad": local(grad), **{n: local(state[n]) for n in member.special.states}}


def _parts(roles: Mapping[str, Any]) -> dict[str, Tensor]:
    """What this process has of each; a gradient that is divided otherwise than its parameter is divided anew."""
    return {
        role: local(distributed_like(whole, roles["param"]) if role == "grad" else whole)
        for role, whole in roles.items()
    }


def _expected(slot: Slot, used: Mapping[int, tuple[Member, Mapping[str, Any]]], steps: Mapping[Tensor, Tensor]) -> Any:
    """The tensor that the plan was made for."""
    if slot.what == NO_GRAD:
        return None
    member, state = used[slot.param]
    if slot.what == "step":
        return steps.get(member.param, state["step"])
    return state[slot.what] if isinstance(slot.what, str) else member.param if slot.what == PARAM else member.grad


def _slots(members: Sequence[Member], params: list[Tensor], states: States) -> list[Slot]:
    order = {id(owner): k for k, owner in enumerate(states)}
    taking_part = {m.position: m for m in members}
    slots: list[Slot] = []
    for k, param in enumerate(params):
        member = taking_part.get(k)
        if member is None:
            slots.append(Slot(k, NO_GRAD))
            continue
        slots += [Slot(k, PARAM), Slot(k, GRAD)]
        slots += [Slot(k, name, order[id(param)]) for name in (*member.special.states, "step")]
    return slots
