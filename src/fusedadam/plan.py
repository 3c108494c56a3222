"""Everything about a step that stays the same until a tensor, a group or a flag changes.

A plan is made once and then used step after step. Making one is where all input is checked, states are created and
kernels compiled; it either succeeds or leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.device_scalars import DeviceScalars
from fusedadam.launch import Amp, Backend, Launches
from fusedadam.launch_table import Floats, Int64s, Roles
from fusedadam.layout import copy_with, dense_strides, lies_as
from fusedadam.rule import Rule, Special
from fusedadam.snapshot import GRAD, NO_GRAD, PARAM, Slot, Snapshot, find, prepare_loop
from fusedadam.steps import HOST, StepCounts
from fusedadam.transfer import capturing

States: TypeAlias = dict[Any, dict[str, Any]]
Options: TypeAlias = tuple[Any, ...]  # the hyper-parameters of a group, in the order of the rule's scalars


@dataclass
class Member:
    """A parameter that takes part in the step."""

    param: Tensor
    position: int  # among all parameters of the optimizer
    group: int
    special: Special
    backend: Backend
    new_state: Callable[[str], Tensor]  # makes a state of that name as it is at the beginning


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
            checks.tensor("grad", member.param.grad)
        fresh = [_missing(member, states.get(member.param, {})) for member in members]
        if capturing() and any(fresh):
            raise RuntimeError(
                "step() is being captured in a CUDA graph, and would make new states, which every replay would empty; "
                "take a step, with the same parameters and options, before the capture"
            )
        roles = [_roles(m, {**states.get(m.param, {}), **new}) for m, new in zip(members, fresh, strict=True)]
        for own in roles:
            checks.alike(own)
        checks.no_shared_memory((role, tensor) for own in roles for role, tensor in own.items())
        for state in states.values():
            checks.one_number("state 'step'", state.get("step", 0.0))
            if state and "step" not in state:
                raise RuntimeError("a state has moments but no 'step': how often was it updated? Load it with its step")
        prepare_loop()
        groups = [m.group for m in members]
        self.launches = Launches([m.special for m in members], roles, [m.backend for m in members], groups)

        # nothing can fail from here on, so now it may be written
        for member, new in zip(members, fresh, strict=True):
            states[member.param].update(new)
        self._tracked = [m.position for m in members if not m.param.is_inference()]
        self.groups: Int64s = np.array(groups, dtype=np.int64)
        self.positions = [m.position for m in members]
        self._adopt(steps, [states[m.param] for m in members], states, on_device)

        slots = _slots(members, params, states)
        self.snapshot = Snapshot(slots, params, states)
        at = {(s.param, s.what): k for k, s in enumerate(slots)}
        names = {"param": PARAM, "grad": GRAD}
        self._at = [{r: at[m.position, names.get(r, r)] for r in m.special.roles} for m in members]
        self._places = [
            np.array([[self._at[k][r] for k in launch.table.members] for r in launch.table.special.roles])
            for launch in self.launches
        ]

    def _adopt(self, steps: StepCounts, own: list[dict[str, Any]], states: States, on_device: bool) -> None:
        """Divides the parameters into those that are counted on the host and those whose device does it."""
        away = [launch.table for launch in self.launches if on_device and launch.table.home != HOST]
        for home in {table.home for table in away}:  # all of a device at once: their counts are one tensor
            there = [own[k] for table in away if table.home == home for k in table.members.tolist()]
            steps.adopt(there, states.values(), home)
        self._away = []
        for table in away:
            places = steps.adopt([own[k] for k in table.members.tolist()], states.values(), table.home)
            table.scalars_on_device = True
            flat = steps.flat(table.home)
            self._away.append(DeviceScalars(self.rule, table, flat, places, self.groups[table.members]))
        elsewhere = {k for table in away for k in table.members.tolist()}
        self._hosted: Int64s = np.array([k for k in range(len(own)) if k not in elsewhere], dtype=np.int64)
        self._steps = steps.adopt([own[k] for k in self._hosted.tolist()], states.values(), HOST)
        self._occurring, self._whose_group = np.unique(self.groups[self._hosted], return_inverse=True)

    @property
    def is_hosted(self) -> bool:
        """Whether the host has to know if the step is taken."""
        return len(self._hosted) > 0

    def place(self) -> None:
        """Takes the present addresses over from the snapshot."""
        for launch, places in zip(self.launches, self._places, strict=True):
            launch.table.place(self.snapshot.addresses[places])

    def run(
        self, params: list[Tensor], states: States, steps: StepCounts, options: Sequence[Options], amp: Amp
    ) -> None:
        """``options``: the hyper-parameters of each group."""
        if not len(self.launches):
            return
        step = steps.next(self._steps)
        if self.is_hosted:
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
            tensors = list(find(self.snapshot.slots, params, states))
            roles = [{role: tensors[k] for role, k in own.items()} for own in self._at]
        self.launches.run(roles, before_anything_is_written=count)
        # as every in-place operation does, so that autograd refuses to go back through a graph that kept them
        written = params if len(self._tracked) == len(params) else [params[k] for k in self._tracked]
        torch.autograd.graph.increment_version(written)

    def report(self, name: str) -> dict[int, float]:
        """A value by tensor of the last step, by the parameter's position in the optimizer; waits for the device."""
        return {
            self.positions[member]: value
            for table, values in self.launches.report(name)
            for member, value in zip(table.members.tolist(), values.tolist(), strict=True)
        }

    def _scalars(self, step: Floats, options: Sequence[Options]) -> tuple[list[Mapping[str, Any]], Int64s]:
        """The scalars of every (options, step) that occurs, and which of them are whose."""
        options = [tuple(float(v) if isinstance(v, Tensor) else v for v in own) for own in options]
        if step.min() == step.max():  # as good as always: one for each group
            keys, whose = [(options[group], float(step[0])) for group in self._occurring], self._whose_group
        else:
            groups = self.groups[self._hosted].tolist()
            keys = [(options[group], number) for group, number in zip(groups, step.tolist(), strict=True)]
            whose = np.arange(len(keys))
        scalars, order = self.rule.scalars_of(keys)
        of_all = np.zeros(len(self.groups), dtype=np.int64)
        of_all[self._hosted] = np.array(order)[whose]
        return scalars, of_all


def _missing(member: Member, state: Mapping[str, Any]) -> dict[str, Any]:
    """States that are not there yet, and those that no longer lie as the parameter does: it was moved or relaid."""
    strides, device = dense_strides(member.param, member.special.by_rows), member.param.device
    new: dict[str, Any] = {} if "step" in state else {"step": 0.0}
    for name in member.special.states:
        if name not in state:
            new[name] = member.new_state(name)
            continue
        checks.tensor(f"state {name!r}", state[name])
        if state[name].shape == member.param.shape and not (
            state[name].device == device and lies_as(state[name], strides)
        ):
            new[name] = copy_with(state[name].to(device), strides)
    return new


def _roles(member: Member, state: Mapping[str, Any]) -> dict[str, Tensor]:
    grad = member.param.grad
    assert grad is not None
    return {"param": member.param, "grad": grad, **{name: state[name] for name in member.special.states}}


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
