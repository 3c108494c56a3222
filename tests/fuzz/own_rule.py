"""Optimizers that the reference does not have: their own rule, by the eager backend in float64.

Whether the rule is right, its test of meaning says. Found here is what a step gets wrong by far more than rounding: a
sign, a stale gradient, a wrong count, an element left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedadam.catalog import CATALOG
from tests.fuzz.judge import Expected, coarsest
from tests.fuzz.reference import Member, States

OF_PRODUCTS = 2.0**16  # the same for matrices that were multiplied in 16 bits
ROUNDING = 2.0**12  # how far errors may grow where terms cancel, or where states are stored and read again


def states_of(name: str, options: Mapping[str, Any], param: Tensor) -> tuple[str, ...]:
    return CATALOG[name].cls.specialized(dict(options), param).states


def begin_state(name: str, state: str, options: Mapping[str, Any], param: Tensor) -> Tensor:
    return CATALOG[name].cls.states[state].new(param, dict(options))


def expected_step(name: str, members: Sequence[Member], after: Sequence[States]) -> list[dict[str, Expected]]:
    """``after``: what the optimizer has stored; a rule that sums goes on with moments as they are stored, of which
    those in float16 may be coarse, or 0."""
    cls: Any = CATALOG[name].cls
    params = [torch.nn.Parameter(member.param.clone()) for member in members]
    known = [{n: v for n, v in member.options.items() if n in cls.options} | {"backend": "eager"} for member in members]
    for own, param, stored in zip(known, params, after, strict=True):
        own |= {state.dtype_option: None for state in cls.states.values()}
        if cls.specialized(own, param).has_sums:
            own |= {cls.states[state].dtype_option: value.dtype for state, value in stored.items()}
    groups = [{"params": [param], **own} for param, own in zip(params, known, strict=True)]
    optimizer = cls(groups or [torch.nn.Parameter(torch.zeros(1, 1))])
    for param, member, own in zip(params, members, known, strict=True):
        dtypes = {state: own[cls.states[state].dtype_option] for state in member.states}
        states = {state: value.to(dtypes[state], copy=True) for state, value in member.states.items()}
        optimizer.state[param] = {**states, "step": torch.tensor(float(member.done))}
        param.grad = member.grad.clone()
    optimizer.step()
    stored = [value.dtype for states in after for value in states.values()]
    compute = coarsest([*(member.dtype for member in members), *stored]) if members else torch.float64
    results = []
    for param, member, own in zip(params, members, known, strict=True):
        before = {"param": member.param, **member.states}
        now = {"param": param.detach(), **{state: optimizer.state[param][state].double() for state in member.states}}
        multiplied = cls.specialized(own, param).product is not None
        grown = {role: OF_PRODUCTS if multiplied and role == "param" else ROUNDING for role in now}
        results.append({r: Expected(v, grown[r] * _size(before[r], v, member.grad), compute) for r, v in now.items()})
    return results


def _size(before: Tensor, after: Tensor, grad: Tensor) -> Tensor:
    """The largest number that went into any element."""
    if not after.numel():
        return after
    largest = max(float(t.abs().max()) for t in (before, after, grad, grad * grad) if t.numel())
    return torch.full_like(after, largest)
