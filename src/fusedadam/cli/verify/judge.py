"""The judge: the rule itself, called as plain Python in float64 on what was stored before the step.

Nothing here is compiled, and only the source of the rule is shared with the backends. The error of a step is the
distance of its results from the judge's, in units in the last place (ulps).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam.formats import compute_dtype
from fusedadam.rules.clipping import clip_factor
from fusedadam.rules.rule import PARAM_FLAGS, PARAM_SCALARS, Rule

F64 = torch.float64
EXPONENT = 0x7FF0000000000000  # of a float64
Roles: TypeAlias = Mapping[str, Tensor]

PROMISED = 2.0  # ulps of the compute dtype, by docs/numerics.md
OF_GRADIENTS = ("exp_avg", "grad_avg", "neg_pre_grad", "exp_avg_fast", "exp_avg_slow")  # as large as these
OVER_ALL = ("clipped", "clip_all", "use_global_grad_norm")  # flags that take the norm of all gradients
OF_AVERAGES = 1.0  # in addition, since the error of the parameter enters its average


@dataclass(frozen=True)
class Member:
    """A parameter in one step: its tensors before the step, its flags and options."""

    before: Roles
    flags: Mapping[str, bool]
    options: Mapping[str, Any]
    group: int


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
    scalars = {member.group: _scalars(rule, member.options, step) for member in members}
    results = []
    for member, clipped, result in zip(members, _clipped(members), after, strict=True):
        results.append(list(_verdicts(rule, member, clipped, result, scalars[member.group])))
    return results


def _verdicts(rule: Rule, member: Member, clipped: Member, after: Roles, scalars: Roles) -> Iterator[Verdict]:
    special = rule.specialize(member.flags, member.before["param"])
    elements = [stage for stage in special.stages if stage.space == "element"]
    early = [role for stage in elements[:-1] for role in stage.writes if role in special.states]
    expected = _exact(rule, clipped, scalars)
    if early:  # later stages read the stored, rounded values
        expected["param"] = _exact(rule, _leading_to(rule, clipped, after, early, scalars), scalars)["param"]
    terms = _sizes_of_terms(rule, clipped, scalars)
    for role in special.outputs:
        size = _size(role, clipped, expected[role], terms)
        if role == "param" and special.by_rows and size.dim() > 1:  # a projection mixes the elements of a row
            size = size.amax(tuple(range(1, size.dim())), keepdim=True).expand_as(size)
        allowed = PROMISED + OF_AVERAGES * (role == "ema_params")
        yield _compare(role, after[role], expected[role], size, allowed, compute_dtype(after["param"].dtype))


def _scalars(rule: Rule, options: Mapping[str, Any], step: int) -> dict[str, Tensor]:
    # with a tensor as the step, powers are computed by torch and not taken from our tables
    made = rule.scalars(step=torch.tensor(float(step), dtype=F64), **options)
    return {name: torch.tensor(float(value), dtype=F64) for name, value in made.items()}


def _exact(rule: Rule, member: Member, scalars: Roles) -> dict[str, Tensor]:
    param = member.before["param"]
    own = {name: torch.tensor(float(ask(param)), dtype=F64) for name, ask in PARAM_SCALARS.items()}
    numbers = {**scalars, **own}
    flags = {**member.flags, **{name: ask(param) for name, ask in PARAM_FLAGS.items()}}
    new = rule(
        **{name: member.before[name].double() if name in member.before else None for name in rule.roles},
        **{name: numbers[name] for name in rule.scalar_names},
        **{name: flags.get(name, False) for name in rule.flags},
    )
    return {role: value for role, value in zip(rule.returned, new, strict=True) if value is not None}


def _clipped(members: Sequence[Member]) -> Iterator[Member]:
    """Clips gradients by norms over several parameters, since a rule sees only one."""

    def norm_of(member: Member) -> Any:
        if member.flags.get("clip_group"):
            return member.group
        return "all" if any(member.flags.get(name) for name in OVER_ALL) else None

    squares: dict[Any, Tensor] = {}
    for member in members:
        own = member.before["grad"].double().square().sum()
        squares[norm_of(member)] = squares.get(norm_of(member), torch.zeros((), dtype=F64)) + own
    for member in members:
        if norm_of(member) is None:
            yield member
            continue
        norm, limit = squares[norm_of(member)].sqrt(), torch.tensor(float(member.options["max_grad_norm"]), dtype=F64)
        divides = member.flags.get("use_global_grad_norm")
        factor = 1 / norm.clamp_min(1.0) if divides else clip_factor(norm, limit)
        grad = member.before["grad"].double() * factor
        flags = {name: on and name not in (*OVER_ALL, "clip_group") for name, on in member.flags.items()}
        yield replace(member, before={**member.before, "grad": grad}, flags=flags)


def _leading_to(rule: Rule, member: Member, after: Roles, names: Sequence[str], scalars: Roles) -> Member:
    """With old states from which the rule computes exactly what was stored: each new state is linear in its old one."""

    def results(x: float) -> dict[str, Tensor]:
        states = {name: torch.full_like(member.before[name], x, dtype=F64) for name in names}
        return _exact(rule, replace(member, before={**member.before, **states}), scalars)

    none, one = results(0.0), results(1.0)
    found = {name: (after[name].double() - none[name]) / (one[name] - none[name]) for name in names}
    return replace(member, before={**member.before, **found})


def _sizes_of_terms(rule: Rule, member: Member, scalars: Roles) -> Roles:
    """The size of results if first moment and gradient did not cancel: their rounding errors scale with it. That of the
    parameter is its update's."""
    roles = {name: value.double().abs() for name, value in member.before.items()}
    roles["param"] = torch.zeros_like(roles["param"])
    if member.flags.get("maximize"):
        roles["grad"] = -roles["grad"]
    return {role: value.abs() for role, value in _exact(rule, replace(member, before=roles), scalars).items()}


def _size(role: str, member: Member, expected: Tensor, terms: Roles) -> Tensor:
    """The numbers whose ulps count: errors of a sum scale with its terms."""
    size = torch.maximum(member.before[role].double().abs(), expected.abs())
    param = member.before["param"].double().abs()
    if expected.shape != param.shape:  # it has one value for the whole parameter
        return size
    if role in ("param", "ema_params"):
        return torch.maximum(torch.maximum(size, param), 2 * terms["param"])
    if role in (
        "momentum_buffer",
        "acc_delta",
        "exp_avg_diff",
    ):  # what is added is as large, and has been rounded before
        return 2 * (member.before[role].double().abs() + expected.abs() + terms[role])
    part = member.before["grad"].double().abs() + member.options["weight_decay"] * param
    return torch.maximum(size, part if role in OF_GRADIENTS else part * part)


def _compare(role: str, got: Tensor, expected: Tensor, size: Tensor, allowed: float, compute: torch.dtype) -> Verdict:
    if not got.numel():
        return Verdict(role, 0.0, 0.0)
    error = (got.double() - expected).abs().nan_to_num_(nan=torch.inf)
    limit = allowed * ulp(size, compute)
    if torch.finfo(got.dtype).eps > torch.finfo(compute).eps:
        limit += 0.5 * ulp(expected, got.dtype)
    return largest_error(role, got, expected, error / limit, error / ulp(size, got.dtype))


def largest_error(role: str, got: Tensor, expected: Tensor, of_allowed: Tensor, ulps: Tensor) -> Verdict:
    at = tuple(int(k) for k in np.unravel_index(int(of_allowed.argmax()), tuple(got.shape)))
    return Verdict(role, float(ulps.max()), float(of_allowed[at]), at, float(expected[at]), float(got[at]))


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of ``dtype`` near ``values``."""
    info = torch.finfo(dtype)
    size = values.double().abs().clamp_min(info.tiny)
    return (size.view(torch.int64) & EXPONENT).view(F64) * info.eps
