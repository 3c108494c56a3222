"""What a class and its rule must agree on is checked when the class is defined, and says what to write."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch

import fusedadam
from fusedadam import OPTIONS, FusedOptimizer, Scalar, State, Value, Values, ascend, checks, rule
from fusedadam.contract import class_checks

PUBLIC = [getattr(fusedadam, name) for name in fusedadam.__all__] + [getattr(ascend, name) for name in ascend.__all__]
CLASSES = [c for c in PUBLIC if isinstance(c, type) and issubclass(c, FusedOptimizer) and hasattr(c, "rule")]


def scalars(step, lr, weight_decay, beta3, mode: Literal["sum", "mean"]) -> dict[str, Any]:
    return {"lr": lr, "decay": weight_decay, "keep": beta3}


@rule(scalars=scalars)
def slow(param: Value, grad: Value, slow_avg: Value, *, lr: Scalar, decay: Scalar, keep: Scalar) -> Values:
    slow_avg = keep * slow_avg + grad
    param = param - lr * slow_avg - decay * param
    return param, slow_avg


CHECKS = {"betas": functools.partial(checks.betas, count=3), "mode": lambda name, value: None}
BODY = {"rule": slow, "states": {"slow_avg": State()}, "options": OPTIONS | CHECKS}


def define(init=None, **changes):
    return type("Mine", (FusedOptimizer,), {**BODY, **({} if init is None else {"__init__": init}), **changes})


def whole(self, params, lr=1e-3, betas=(0.9, 0.99, 0.999), weight_decay=0.0, mode="sum"):
    FusedOptimizer.__init__(self, params, lr=lr, betas=betas, weight_decay=weight_decay, mode=mode)


def anything(self, params, lr=1e-3, betas=(0.9, 0.99, 0.999), weight_decay=0.0, mode="sum", **common):
    FusedOptimizer.__init__(self, params, lr=lr, betas=betas, weight_decay=weight_decay, mode=mode, **common)


def leaf():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return param


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_the_classes_of_this_package_agree_with_their_rules(cls):
    """They are not checked when they are imported."""
    class_checks.check_class(cls)


def test_three_betas():
    define(whole)([leaf()]).step()
    with pytest.raises(ValueError, match=r"betas=\(0.9, 0.99\) must be 3 numbers in \[0, 1\)"):
        define(whole)([leaf()], betas=(0.9, 0.99))


def test_an_option_that_the_signature_lacks():
    def without_decay(self, params, lr=1e-3, betas=(0.9, 0.99, 0.999), mode="sum"): ...

    with pytest.raises(TypeError, match="the rule of Mine needs weight_decay; add it to the arguments of __init__"):
        define(without_decay)

    def without_betas(self, params, lr=1e-3, weight_decay=0.0, mode="sum"): ...

    with pytest.raises(TypeError, match="the rule of Mine needs beta3, which follows from betas; add it"):
        define(without_betas)

    def must_be_given(self, params, lr, betas, weight_decay, mode): ...

    define(must_be_given)
    define(without_decay, fixed={"weight_decay": 0.5})


def test_too_few_betas():
    def two(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0, mode="sum"): ...

    with pytest.raises(TypeError, match=r"needs beta3, and betas=\(0.9, 0.99\) has no such value"):
        define(two)


def test_an_option_that_is_not_passed_on():
    def forgets(self, params, lr=1e-3, betas=(0.9, 0.99, 0.999), weight_decay=0.0, mode="sum"):
        FusedOptimizer.__init__(self, params, lr=lr, betas=betas, mode=mode)

    with pytest.raises(TypeError, match=r"needs weight_decay; pass it on: super\(\).__init__\(params, weight_decay="):
        define(forgets)([leaf()])


def test_an_option_that_does_not_exist():
    mine = define(anything)
    assert mine([leaf()], backend="eager", maximize=False, max_grad_norm=None)
    with pytest.raises(TypeError, match=r"Mine has no option 'storge'; did you mean 'storage'\?"):
        mine([leaf()], storge="8bit")
    with pytest.raises(TypeError, match="Mine has no option 'qqq'; it has lr, weight_decay"):
        mine([leaf()], qqq=1)


@pytest.mark.parametrize(("name", "value"), [("maximize", True), ("max_grad_norm", 1.0)])
def test_an_option_that_the_rule_does_nothing_with(name, value):
    """It would be ignored without a word: a training that should maximize would minimize."""
    param, mine = leaf(), define(anything)
    says = f"{name}={value!r} has no effect in Mine: its rule does not use it"
    with pytest.raises(ValueError, match=says):
        mine([param], **{name: value})
    with pytest.raises(ValueError, match=says):
        mine([{"params": [param], name: value}])


@pytest.mark.parametrize(("name", "value"), [("maximize", True), ("max_grad_norm", 1.0), ("weight_decay", 0.1)])
@pytest.mark.parametrize("how", ["set", "added", "loaded"])
def test_the_same_option_later(name, value, how):
    param = leaf()
    optimizer = Plain([param])
    optimizer.step()
    before, says = param.detach().clone(), f"{name}={value!r} has no effect in Plain: its rule does not use it"
    if how == "added":
        with pytest.raises(ValueError, match=says):
            optimizer.add_param_group({"params": [leaf()], name: value})
        return optimizer.step()
    if how == "set":
        optimizer.param_groups[0][name] = value
    else:
        saved = optimizer.state_dict()
        saved["param_groups"][0][name] = value
        optimizer.load_state_dict(saved)
    for _ in range(2):
        with pytest.raises(ValueError, match=says):
            optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 1
    optimizer.param_groups[0][name] = class_checks.WITHOUT_EFFECT[name]
    return optimizer.step()


@rule(scalars=lambda lr: {"lr": lr})
def plain_rule(param: Value, grad: Value, *, lr: Scalar) -> Values:
    param = param - lr * grad
    return param


class Plain(FusedOptimizer):
    rule = plain_rule
    states = {}

    def __init__(self, params, lr=0.5, **common):
        super().__init__(params, lr=lr, **common)


def just_a_function(param: Value, grad: Value) -> Values:
    return param


def test_a_rule_that_is_just_a_function():
    says = r"Mine.rule is a function; make just_a_function a rule: write @rule\(scalars=...\) above it"
    with pytest.raises(TypeError, match=says):
        define(whole, rule=just_a_function)


@pytest.mark.parametrize("what", ["options", "derived"])
def test_a_check_that_is_called_instead_of_passed(what):
    made = {**getattr(FusedOptimizer, what), **CHECKS, "betas": checks.betas("betas", (0.9, 0.99))}
    with pytest.raises(TypeError, match=rf"Mine.{what}\['betas'\] is None; it must be a function, which is passed"):
        define(whole, **{what: made})
    with pytest.raises(TypeError, match=rf"Theirs.{what}\['betas'\] is None"):
        type("Theirs", (fusedadam.AdamW,), {what: made})


def test_a_class_without_a_rule_and_states_that_are_a_list():
    with pytest.raises(TypeError, match="Empty has no rule; set rule"):
        type("Empty", (FusedOptimizer,), {})([leaf()])
    with pytest.raises(TypeError, match="its rule has slow_avg; declare each of these, as in"):
        define(whole, states=["slow_avg"])
    with pytest.raises(ValueError, match="initial='two' is unknown; use one of 'zero', 'one', 'param'"):
        State(initial="two")


@pytest.mark.parametrize(
    ("state", "kind"),
    [(State, "the class State"), ("zero", "a str"), (None, "a NoneType"), (torch.zeros(1), "a Tensor")],
)
def test_a_state_that_is_not_one(state, kind):
    with pytest.raises(TypeError, match=rf"Mine.states\['slow_avg'\] is {kind}; write State\(\), with parentheses"):
        define(whole, states={"slow_avg": state})


def test_scalars_need_not_take_the_step():
    param = leaf()
    Plain([param], lr=0.5).step()
    assert torch.equal(param.detach(), torch.full((3,), 0.5))


def test_a_string_where_the_scalars_calculate_with_numbers():
    def plain(step, lr, weight_decay, beta3, mode) -> dict[str, Any]:
        return {"lr": lr, "decay": weight_decay, "keep": beta3}

    with pytest.raises(TypeError, match=r"mode='sum' is a string, .* annotate it there .*: Literal\['sum', ...\]"):
        define(whole, rule=rule(scalars=plain)(slow.update))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (State(maximum_of="exp_avg"), "has maximum_of='exp_avg', which is no state of its rule"),
        (State(subtracted_from="exp_avg"), "has subtracted_from='exp_avg', which is no state of its rule"),
        (State(dtype_option="dtype"), "has dtype_option='dtype', which is not in options"),
        (State(decay="beta4"), "has decay='beta4', which is neither in options nor in derived"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "state",
)
def test_states_that_name_something_else(state, says):
    with pytest.raises(TypeError, match=says):
        define(whole, states={"slow_avg": state})
