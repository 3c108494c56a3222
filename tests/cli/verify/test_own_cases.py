"""Cases of an optimizer that nobody has written tables for follow from its class."""

from __future__ import annotations

import functools
import itertools
import sys
import types

import pytest
import torch

from fusedadam import DERIVED, OPTIONS, FusedOptimizer, State, checks
from fusedadam.cli.verify.cases import MIXES, OF_ALL, together
from fusedadam.cli.verify.own_cases import own_cases
from fusedadam.cli.verify.run import verify
from fusedadam.cli.verify.steps import Place
from fusedadam.contract.storage import PRESETS
from fusedadam.ops import clipped_by_norm, power
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule

EAGER = Place("cpu", "eager")


def _scalars(step, lr, momentum, weight_decay, max_grad_norm):
    return {"lr": lr, "keep": momentum, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm}


@rule(scalars=_scalars)
def everything(
    param: Value, grad: Value, slow: Value, momentum_buffer: Value, *,
    lr: Scalar, keep: Scalar, weight_decay: Scalar, max_grad_norm: Scalar,
    clipped: Flag, maximize: Flag, with_momentum: Flag, nesterov: Flag, cubic: Flag, squared: Flag,
) -> Values:  # fmt: skip
    if maximize:
        grad = -grad
    if clipped:
        grad, norm = clipped_by_norm(grad, max_grad_norm)  # noqa: RUF059  no name may begin with _
    grad = grad + weight_decay * param
    if squared:
        grad = grad * grad
    elif cubic:
        grad = grad * grad * grad
    slow = slow + keep * (param - slow)
    if with_momentum:
        momentum_buffer = keep * momentum_buffer + grad
        grad = grad + keep * momentum_buffer if nesterov else momentum_buffer
    param = param - lr * grad
    return param, slow, momentum_buffer


class Everything(FusedOptimizer):
    """With every kind of option that chooses between formulas; some of them exclude each other."""

    rule = everything
    states = {"slow": State(initial="param", dtype_option="slow_dtype"), "momentum_buffer": State(decay="momentum")}
    options = OPTIONS | {
        "momentum": checks.fraction, "nesterov": checks.boolean, "slow_dtype": checks.storage_dtype,
        "shape": functools.partial(checks.one_of, allowed=("linear", "squared", "cubic")),
    }  # fmt: skip
    derived = DERIVED | {name: lambda group, name=name: group["shape"] == name for name in ("squared", "cubic")}

    def __init__(self, params, lr=1e-2, momentum=0.0, weight_decay=0.0, nesterov=False, shape="linear"):
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, shape=shape,
            max_grad_norm=None,
        )  # fmt: skip

    @classmethod
    def check(cls, group, names=None):
        super().check(group, names)
        if group.get("nesterov") and not group.get("momentum"):
            raise ValueError("nesterov=True needs momentum")


VALUES = {
    "max_grad_norm": {None, OF_ALL}, "maximize": {False, True}, "momentum": {0.0, 0.875}, "nesterov": {False, True},
    "shape": {"linear", "squared", "cubic"},
}  # fmt: skip


@rule(scalars=lambda lr: {"lr": lr})
def rooted(param: Value, grad: Value, *, lr: Scalar) -> Values:
    param = param - lr * power(grad * grad, 0.3)
    return param


class Rooted(FusedOptimizer):
    """With as little as possible: no state, no option but the learning rate."""

    rule = rooted
    states = {}
    options = {"lr": checks.number}

    def __init__(self, params, lr=0.125):
        super().__init__(params, lr=lr)


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("own_optimizers")
    made.Everything, made.Rooted = Everything, Rooted
    monkeypatch.setitem(sys.modules, "own_optimizers", made)
    return "own_optimizers"


def values_tried(cases):
    defaults = {"max_grad_norm": None, "maximize": False, "momentum": 0.0, "nesterov": False, "shape": "linear"}
    return {name: {{**defaults, **dict(case.flags)}[name] for case in cases} for name in VALUES}


def test_every_value_of_every_option_every_dtype_and_preset_is_tried(module):
    cases = own_cases(f"{module}:Everything", everything=False)
    assert values_tried(cases) == VALUES
    plain = [case for case in cases if case.storage is None]
    assert {(case.param, case.state) for case in plain} == set(MIXES)
    assert [case.storage for case in cases if case.storage] == list(PRESETS)
    assert sum(case.scaled for case in cases) == 1
    assert len(set(cases)) == len(cases) <= len(MIXES) + len(PRESETS) + 1
    assert len(together(cases)) <= 4, "few combinations, since each has kernels of its own"


def test_everything_is_every_combination_that_the_class_accepts(module):
    cases = own_cases(f"{module}:Everything", everything=True)
    combinations = [dict(zip(VALUES, each, strict=True)) for each in itertools.product(*VALUES.values())]
    allowed = [each for each in combinations if each["momentum"] or not each["nesterov"]]
    assert len(set(cases)) == len(cases) == len(allowed) * (len(MIXES) + len(PRESETS))


def test_options_that_need_others_come_when_those_are_there(module):
    cases = own_cases(f"{module}:Everything", everything=False)
    assert all(dict(case.flags).get("momentum") for case in cases if dict(case.flags).get("nesterov"))
    assert any("nesterov=True" in case.title for case in cases)


def test_groups_differ_in_numbers_and_states_have_their_own_dtypes(module):
    case = next(c for c in own_cases(f"{module}:Everything", everything=False) if c.param != c.state)
    params = [torch.nn.Parameter(torch.ones(3, dtype=case.param)) for _ in range(2)]
    optimizer = case.make(params, "eager")
    first, second = optimizer.param_groups
    assert (second["lr"], second["weight_decay"]) == (first["lr"] / 4, 0.0625)
    for param in (*first["params"], *second["params"]):
        param.grad = param.detach().clone()
    optimizer.step()
    kept = optimizer.state[first["params"][0]]
    assert {kept[name].dtype for name in kept if name != "step"} == {case.state}


@pytest.mark.parametrize("name", ["Everything", "Rooted"])
def test_every_case_runs_and_is_right(module, name):
    for case in own_cases(f"{module}:{name}", everything=False):
        result = verify(case, [EAGER], 0)
        assert not result.failures, case.title
        assert bool(result.errors) == case.is_judged


def test_backends_may_differ_by_an_ulp_where_the_rule_takes_powers(module):
    assert not any(case.has_same_bits for case in own_cases(f"{module}:Rooted", everything=False))
    assert all(case.has_same_bits for case in own_cases(f"{module}:Everything", everything=False))
