"""Checks that training can continue from the state of an interrupted optimizer."""

from __future__ import annotations

import copy

import torch

from tests.contract.common import params_of


def values(optimizer):
    """Of each parameter the values of all its tensors; a state that does not exist yet has its initial value."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            names = [n for n in optimizer.rule.roles if n not in ("param", "grad", "max_exp_avg_sq")]
            first = {n: p.detach() if n == "ema_params" else torch.zeros_like(p) for n in names}
            state = {"step": torch.tensor(0.0), **first, **optimizer.state.get(p, {}), "param": p.detach()}
            found.append({name: torch.as_tensor(value).clone() for name, value in state.items()})
    return found


def reloaded(optimizer, make):
    """Another optimizer with copies of the same parameters, gradients and states."""
    params = []
    for p in params_of(optimizer):
        twin = torch.nn.Parameter(torch.empty_like(p.detach()).copy_(p.detach()))
        twin.grad = None if p.grad is None else p.grad.clone()
        params.append(twin)
    other = make(params)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


def assert_old_or_new(now, before, after, together, where):
    """``together``: all tensors of the same dtype must be old, or all new."""
    seen = {}
    for k, own in enumerate(now):
        for name, value in own.items():
            is_old, is_new = (torch.equal(value, one[k][name]) for one in (before, after))
            assert is_old or is_new, f"{where}: {name} of parameter {k} is neither old nor new"
            if is_old != is_new:
                key = "step" if name == "step" else own["param"].dtype if together else (k, name)
                seen.setdefault(key, {})[k, name] = is_new
    for key, which in seen.items():
        assert len(set(which.values())) == 1, f"{where}: of {key} some are old and some are new: {which}"
    counted = any(seen.get("step", {}).values())
    changed = [key for key, which in seen.items() if key != "step" and any(which.values())]
    assert counted or not changed, f"{where}: the step has not been counted, but {changed} have changed"


def assert_same_values(one, other, label):
    for k, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"{label}: {name} of parameter {k} differs"
