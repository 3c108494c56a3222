"""The judge: the rule itself, called as plain Python on what was stored before the step. Nothing here is compiled.

Bounded numbers (bounded.py) take the place of tensors, and their functions that of our ops. So every result comes in
float64, with the error that rounding may add up to in the operations of the rule: no rule needs limits of its own.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from fusedadam.cli.verify import bounded
from fusedadam.cli.verify.bounded import F64, Bounded, Run, ulp
from fusedadam.formats import compute_dtype
from fusedadam.rules import ops
from fusedadam.rules.newton_schulz import DEFAULT, NewtonSchulz
from fusedadam.rules.rule import PARAM_FLAGS, PARAM_SCALARS, Rule

Roles: TypeAlias = Mapping[str, Tensor]
Place: TypeAlias = tuple[int, ...]  # of a call in the rule: instructions, the outermost first
Results: TypeAlias = dict[str, Bounded]
SUMS = {ops.group_sum: bounded.tensor_sum, ops.total: bounded.tensor_sum, ops.largest: bounded.largest}


@dataclass(frozen=True)
class Member:
    """A parameter in one step: its tensors before the step, its flags and options."""

    before: Roles
    flags: Mapping[str, bool]
    options: Mapping[str, Any]
    group: int
    newton_schulz: NewtonSchulz = DEFAULT


@dataclass(frozen=True)
class Verdict:
    """The largest error of one role of one parameter, and the element that has it."""

    role: str
    ulps: float  # of the dtype that the role is stored in
    of_allowed: float  # the error relative to what is allowed; above 1 it is wrong
    index: tuple[int, ...] = ()
    expected: float = 0.0
    got: float = 0.0


def judge(rule: Rule, members: Sequence[Member], after: Sequence[Roles], step: int) -> list[list[Verdict]]:
    """For each parameter, the error of each role that the rule writes in the ``step``-th step."""
    scalars = {member.group: _scalars(rule, member, step) for member in members}
    calls = [_Call(rule, member, scalars[member.group]) for member in members]
    _evaluate(calls)
    for call, stored in zip(calls, after, strict=True):
        call.reload_what_is_stored_early(stored)
    if any(call.reloaded for call in calls):
        _evaluate(calls)
    pairs = zip(calls, after, strict=True)
    return [[_verdict(call, role, stored[role]) for role in call.special.outputs] for call, stored in pairs]


def _scalars(rule: Rule, member: Member, step: int) -> dict[str, float]:
    # with a tensor as the step, powers are computed by torch and not taken from our tables; in float64 that would
    # be judged by its own rounding errors
    is_float64 = member.before["param"].dtype == F64
    count = float(step) if is_float64 else torch.tensor(float(step), dtype=F64)
    return {name: float(value) for name, value in rule.scalars(step=count, **member.options).items()}


@dataclass
class _Call:
    """The rule's call for one parameter; ``reloaded``: roles, by their places among its results, that kernels store and
    read again before the end."""

    rule: Rule
    member: Member
    scalars: Mapping[str, float]
    results: Results = field(default_factory=dict)
    reloaded: dict[str, int] = field(default_factory=dict)
    replaced: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        param = self.member.before["param"]
        self.special = self.rule.specialize(self.member.flags, param)
        self.dtype = compute_dtype(param.dtype)

    def evaluate(self, shared: _Shared) -> None:
        """Raises _Unknown at a sum over several parameters whose value is not known yet."""
        run, param = Run(self.dtype, self.replaced), self.member.before["param"]
        own = {name: ask(param, param.dtype) for name, ask in PARAM_SCALARS.items()}
        numbers = {name: run.exact(value) for name, value in {**self.scalars, **own}.items()}
        flags = {**self.member.flags, **{name: ask(param) for name, ask in PARAM_FLAGS.items()}}
        before = {name: run.exact(value.double()) for name, value in self.member.before.items()}
        new = _with_bounds(self.rule, self.member, shared)(
            **{name: before.get(name) for name in self.rule.roles},
            **{name: numbers[name] for name in self.rule.scalar_names},
            **{name: flags.get(name, False) for name in self.rule.flags},
        )
        new = new if isinstance(new, tuple) else (new,)
        self.results = {role: value for role, value in zip(self.rule.returned, new, strict=True) if value is not None}
        # what was computed before it was stored and read again
        self.results |= {role: run.computed[place] for role, place in self.reloaded.items()}

    def reload_what_is_stored_early(self, stored: Roles) -> None:
        elements = [stage for stage in self.special.stages if stage.space == "element"]
        for role in (role for stage in elements[:-1] for role in stage.writes if role in self.results):
            place = self.results[role].place
            if place is not None:
                self.reloaded[role], self.replaced[place] = place, stored[role]


class _Unknown(Exception):
    """A sum over several parameters, and this parameter's part of it."""

    def __init__(self, place: Place, over: Any, part: Bounded, is_largest: bool) -> None:
        self.place, self.over, self.part, self.is_largest = place, over, part, is_largest


# by place, and by what they are over: the values of sums over several parameters, and their errors
_Shared: TypeAlias = dict[tuple[Place, Any], tuple[Tensor, Tensor]]


def _evaluate(calls: Sequence[_Call]) -> None:
    """Calls the rule for all parameters, again and again until all sums over several of them are known."""
    shared: _Shared = {}
    while True:
        unknown: list[_Unknown] = []
        for call in calls:
            try:
                call.evaluate(shared)
            except _Unknown as found:
                unknown.append(found)
        if not unknown:
            return
        # of several sums the first: a parameter that waits for another sum has no term in this one, or is not there yet
        first = min(found.place for found in unknown)
        for over in {found.over for found in unknown if found.place == first}:
            parts = [found for found in unknown if (found.place, found.over) == (first, over)]
            values, errors = (torch.stack([getattr(p.part, name) for p in parts]) for name in ("value", "error"))
            is_largest = parts[0].is_largest
            shared[first, over] = (values.amax(0), errors.amax(0)) if is_largest else (values.sum(0), errors.sum(0))


def _with_bounds(rule: Rule, member: Member, shared: _Shared) -> Rule:
    """The same rule, and helpers that it calls, with ops that take bounded numbers."""

    def over_several(op: Callable[..., Any]) -> Callable[[Bounded], Bounded]:
        def answer(x: Bounded) -> Bounded:
            place, over = _place(sys._getframe(1)), member.group if op is ops.group_sum else "all"
            if (place, over) not in shared:
                raise _Unknown(place, over, SUMS[op](x), op is ops.largest)
            return x.run.unrounded(*shared[place, over])

        return answer

    meaning: dict[Callable[..., Any], Callable[..., Any]] = {
        **bounded.MEANING,
        **{op: over_several(op) for op in SUMS},
        ops.orthogonalized: functools.partial(bounded.orthogonalized, method=member.newton_schulz),
    }
    made: dict[FunctionType, FunctionType] = {}

    def rebuilt(function: FunctionType) -> FunctionType:
        if function not in made:
            names = dict(function.__globals__)
            made[function] = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
            for name in function.__code__.co_names:
                called = names.get(name)
                if isinstance(called, FunctionType):
                    names[name] = meaning[called] if called in meaning else rebuilt(called)
        return made[function]

    bounded_rule = copy.copy(rule)
    bounded_rule.update = rebuilt(cast(FunctionType, rule.update))
    bounded_rule.opening = None if rule.opening is None else rebuilt(cast(FunctionType, rule.opening))
    return bounded_rule


def _place(frame: FrameType | None) -> Place:
    place: list[int] = []
    while frame is not None and frame.f_globals is not globals():
        place.insert(0, frame.f_lasti)
        frame = frame.f_back
    return tuple(place)


def _verdict(call: _Call, role: str, got: Tensor) -> Verdict:
    if not got.numel():
        return Verdict(role, 0.0, 0.0)
    before, result, compute = call.member.before[role], call.results[role], call.dtype
    expected, limit = (x.expand(got.shape) for x in (result.value, result.error))
    stored = expected.to(got.dtype)
    # an overflow, or the NaN of a rule that divides by zero, is right if it is expected
    is_same = (got == stored) | (got.isnan() & stored.isnan())
    error = torch.where(is_same & ~got.isfinite(), 0.0, (got.double() - expected).abs().nan_to_num(nan=torch.inf))
    size = torch.maximum(before.double().abs(), _finite(expected).abs())
    if compute == F64:
        limit = 2 * limit  # the judge rounds, too
    if torch.finfo(got.dtype).eps > torch.finfo(compute).eps:
        limit = limit + 0.5 * ulp(_finite(expected.abs() + limit), got.dtype)
    of_allowed = torch.where((error == 0) | limit.isinf(), 0.0, error / limit)
    at = tuple(int(k) for k in np.unravel_index(int(of_allowed.argmax()), tuple(got.shape)))
    ulps = float((error / ulp(size, got.dtype)).max())
    return Verdict(role, ulps, float(of_allowed[at]), at, float(expected[at]), float(got[at]))


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def calls(update: Callable[..., Any], op: Callable[..., Any]) -> bool:
    """Whether a rule calls this op, itself or in a helper."""
    assert isinstance(update, FunctionType)
    used = [update.__globals__.get(name) for name in update.__code__.co_names]
    functions = [found for found in used if isinstance(found, FunctionType)]
    return any(found is op or (found not in bounded.MEANING and calls(found, op)) for found in functions)
