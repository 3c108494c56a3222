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
from fusedadam.launch import Backend, Launches
from fusedadam.launch_table import Floats, Int64s, Roles
from fusedadam.layout import copy_with, dense_strides, lies_as
from fusedadam.rule import Rule, Special
from fusedadam.snapshot import GRAD, NO_GRAD, PARAM, Slot, Snapshot, find, prepare_loop
from fusedadam.steps import StepCounts

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
    def __init__(
        self, rule: Rule, members: Sequence[Member], params: list[Tensor], states: States, steps: StepCounts
    ) -> None:
        self.rule = rule
        for member in members:
            checks.written("param", member.param)
            checks.tensor("grad", member.param.grad)
        fresh = [_missing(member, states.get(member.param, {})) for member in members]
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
        self._occurring, self._whose_group = np.unique(self.groups, return_inverse=True)
        self.steps = steps.adopt([states[m.param] for m in members], states.values())

        slots = _slots(members, params, states)
        self.snapshot = Snapshot(slots, params, states)
        at = {(s.param, s.what): k for k, s in enumerate(slots)}
        names = {"param": PARAM, "grad": GRAD}
        self._at = [{r: at[m.position, names.get(r, r)] for r in m.special.roles} for m in members]
        self._places = [
            np.array([[self._at[k][r] for k in launch.table.members] for r in launch.table.special.roles])
            for launch in self.launches
        ]

    def place(self) -> None:
        """Takes the present addresses over from the snapshot."""
        for launch, places in zip(self.launches, self._places, strict=True):
            launch.table.place(self.snapshot.addresses[places])

    def run(self, params: list[Tensor], states: States, steps: StepCounts, options: Sequence[Options]) -> None:
        """``options``: the hyper-parameters of each group."""
        if not len(self.launches):
            return
        step = steps.next(self.steps)
        scalars, whose = self._scalars(step, options)
        self.launches.set_scalars(scalars, whose)
        roles: Sequence[Roles] = ()
        if self.launches.needs_tensors:
            tensors = list(find(self.snapshot.slots, params, states))
            roles = [{role: tensors[k] for role, k in own.items()} for own in self._at]
        self.launches.run(roles, before_anything_is_written=lambda: steps.set(self.steps, step))
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
        if step.min() == step.max():  # as good as always: one for each group
            keys, whose = [(options[group], float(step[0])) for group in self._occurring], self._whose_group
        else:
            keys = [(options[group], number) for group, number in zip(self.groups, step.tolist(), strict=True)]
            whose = np.arange(len(keys))
        scalars, order = self.rule.scalars_of(keys)
        return scalars, np.array(order)[whose]


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
