"""A parameter that takes part in a step, as the optimizer has it, and the states that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.backend import Backend
from fusedadam.engine.member import Member, Roles
from fusedadam.rules.rule import SpecializedRule
from fusedadam.tensors.layout import copy_with, dense_strides, has_strides, is_plain
from fusedadam.tensors.shards import is_sharded_like, local, with_local
from fusedadam.tensors.transfer import capturing

StateDict: TypeAlias = dict[str, Any]  # of one parameter, by name


@dataclass
class Participant:
    """A parameter that takes part in the step, as the optimizer has it.

    A sharded parameter whose sums other processes wait for takes part even if it has no gradient here.
    """

    param: Tensor
    grad: Tensor | None  # as it was when the plan was begun; another thread may replace it at any time
    index: int  # among all parameters of the optimizer
    group: int
    specialized: SpecializedRule
    backend: Backend
    new_state: Callable[[str], Tensor]  # makes a state of that name, with its initial value
    state: StateDict = field(default_factory=dict)  # as it will be: what was there, and ``fresh``
    fresh: StateDict = field(default_factory=dict)  # states that are made with the plan

    @property
    def is_absent(self) -> bool:
        return self.grad is None

    @property
    def redistributes_grad(self) -> bool:
        return not self.is_absent and not is_sharded_like(self.grad, self.param)

    def as_member(self) -> Member:
        return Member(
            self.specialized,
            self.backend,
            self._roles(),
            self.group,
            self.param,
            self.is_absent,
            self.redistributes_grad,
        )

    def _roles(self) -> Roles:
        here = local(self.param)
        if self.is_absent:
            return dict.fromkeys(self.specialized.roles, here.new_empty(0))
        grad: Any = self.grad
        if self.redistributes_grad:  # on every run, together with the other processes; here only its form counts
            grad = torch.empty_like(here, dtype=grad.dtype, device=grad.device)
        return {
            "param": here,
            "grad": local(grad),
            **{name: local(self.state[name]) for name in self.specialized.states},
        }


def prepare_states(participants: Sequence[Participant], known: Mapping[Tensor, StateDict]) -> None:
    """Checks parameters and gradients, and makes the states that are missing. ``known``: the states of all parameters,
    which this does not change."""
    _check(participants)
    for p in participants:
        before = known.get(p.param, {})
        p.fresh = {} if p.is_absent else _fresh_states(p, before)
        p.state = {**before, **p.fresh}
    if capturing() and any(p.fresh for p in participants):
        raise RuntimeError(
            "step() is being captured in a CUDA graph, and would make new states, which every replay would empty; "
            "take a step, with the same parameters and options, before the capture"
        )


def _check(participants: Sequence[Participant]) -> None:
    for p in participants:
        checks.written("param", p.param)
        if not p.is_absent:
            checks.tensor("grad", p.grad)
            checks.both_sharded("grad", p.grad, p.param)


def check_step_counts(known: Mapping[Tensor, StateDict]) -> None:
    for state in known.values():
        checks.one_number("state 'step'", state.get("step", 0.0))
        if state and "step" not in state:
            raise RuntimeError("a state has moments but no 'step': how often was it updated? Load it with its step")


def _fresh_states(p: Participant, state: Mapping[str, Any]) -> StateDict:
    """States that are missing, and new copies of states whose layout or device is no longer the parameter's."""
    param = local(p.param)
    strides, device = dense_strides(param, p.specialized.by_rows), param.device
    fresh: StateDict = {} if "step" in state else {"step": 0.0}
    for name in p.specialized.states:
        if name not in state:
            fresh[name] = p.new_state(name)
            continue
        checks.tensor(f"state {name!r}", state[name])
        if not is_sharded_like(state[name], p.param):
            raise RuntimeError(
                f"state {name!r} is not sharded as its param is; set it with load_state_dict, or with "
                "torch.distributed.checkpoint"
            )
        here = local(state[name])
        if here.shape == param.shape and not (here.device == device and has_strides(here, strides) and is_plain(here)):
            fresh[name] = with_local(p.param, copy_with(here.to(device), strides))
    return fresh
