"""What a rule's scalars may contain. Anything else is refused when the rule is defined.

That a device computes the bits of the host for what is allowed: see engine/test_device_scalars.py.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import numpy as np
import pytest
import torch

from fusedadam.rules.ops import abs as op_abs
from fusedadam.rules.ops import cos, divide, exp, log, maximum, minimum, power, sqrt, where
from fusedadam.rules.rule import RuleError, Scalar, Value, Values, rule

STEPS = [1.0, 2.0, 3.0, 10.0, 4097.0]


def defined(scalars):
    """A rule with these scalars."""

    def sgd(param: Value, grad: Value, *, x: Scalar) -> Values:
        param = param - x * grad
        return param

    return rule(scalars=scalars)(sgd)


ALLOWED = [
    lambda step, lr, beta: where(step == 1, 0.0, 1.0),
    lambda step, lr, beta: where(step != 2, lr, beta),
    lambda step, lr, beta: where((step > 1) & (step <= 10), lr, 2 * lr),
    lambda step, lr, beta: where((step < 2) | (step >= 10), lr, step),
    lambda step, lr, beta: 1 - beta**step,
    lambda step, lr, beta: 0.5**step,
    lambda step, lr, beta: divide(lr, 1 - beta**step),
    lambda step, lr, beta: divide(step, 3.0),
    lambda step, lr, beta: step / 3.0,
    lambda step, lr, beta: 3.0 / step,
    lambda step, lr, beta: (1 + step) / (10 + step),
    lambda step, lr, beta: -step * lr + (2 - step),
    lambda step, lr, beta: sqrt(step) + op_abs(-step) + maximum(step, 5.0) * minimum(step, 3.0),
    lambda step, lr, beta: 0.5 * (1 + where(step > 3, lr, 0.25)) / 2,
    lambda step, lr, beta: 1 / sqrt(1 - beta**step),
    lambda step, lr, beta: (1 - beta) ** step,
    lambda step, lr, beta: step / beta,
    lambda step, lr, beta: lr / 3.0,
    lambda step, lr, beta: lr / beta + (1 + step) / 3.0,
    lambda step, lr, beta: 3.0 / (lr + 1),
    lambda step, lr, beta: where(lr > 0, 1 - beta**step, 3.0) / (1 - 0.5**step),
    lambda step, lr, beta: (beta / 3) ** step,
    lambda step, lr, beta: +lr,
    lambda step, lr, beta: where(step > 2, 1 - beta**step, 3.0) / (1 - 0.5**step),
    lambda step, lr, beta: where(where(step > 2, step < 9, lr > 0), lr, 1.0),
    lambda step, lr, beta: where(np.bool_(True), lr, 1.0),
    lambda step, lr, beta: lr * np.float64(0.3) + np.int64(3) * step,
    lambda step, lr, beta: cos(step) + power(step, 0.5) * exp(0.0 - lr) * log(step),
]


REFUSED = {
    "where": [
        lambda step, lr, beta: 0.0 if step == 1 else 1.0,
        lambda step, lr, beta: lr if step > 10 and lr > 0 else 0.0,
        lambda step, lr, beta: 1.0 if not step else lr,
        lambda step, lr, beta: lr or 1.0,
        lambda step, lr, beta: min(lr, step),
        lambda step, lr, beta: (step > 3) * lr,
        lambda step, lr, beta: where(step, lr, 0.0),
        lambda step, lr, beta: where(beta, lr, 0.0),
        lambda step, lr, beta: 1.0 if (1 + step) * 2 == 4 else 0.0,
    ],
    "fusedadam.ops": [
        lambda step, lr, beta: math.sqrt(step),
        lambda step, lr, beta: math.sqrt(1 - beta**step),
        lambda step, lr, beta: math.floor(step),
        lambda step, lr, beta: float(lr),
        lambda step, lr, beta: int(step) + 1,
        lambda step, lr, beta: round(lr),
        lambda step, lr, beta: step % 2,
        lambda step, lr, beta: step // 2,
        lambda step, lr, beta: abs(step),
        lambda step, lr, beta: np.sqrt(step),
        lambda step, lr, beta: {0: 1.0}[step],
        lambda step, lr, beta: [1.0, 2.0][step],
    ],
    "float": [
        lambda step, lr, beta: lr * np.float32(0.5),
        lambda step, lr, beta: np.float32(0.5) * step,
        lambda step, lr, beta: step > np.float16(3),
        lambda step, lr, beta: maximum(lr, np.array(0.5)),
        lambda step, lr, beta: where(step > 1, lr, torch.tensor(0.5)),
        lambda step, lr, beta: np.float64(0.9) ** step,
        lambda step, lr, beta: np.float32(0.5),
        lambda step, lr, beta: None,
    ],
    "Literal": [lambda step, lr, beta: where(beta == "plain", lr, 0.0)],
    "power": [
        lambda step, lr, beta: lr**2,
        lambda step, lr, beta: step**2,
        lambda step, lr, beta: 2.0**lr,
        lambda step, lr, beta: lr**step,
        lambda step, lr, beta: where(lr > 0, beta, 0.5) ** step,
    ],
}


@pytest.mark.parametrize(
    ("hint", "compute"),
    [pytest.param(hint, f, id=f"{hint}-{k}") for hint, given in REFUSED.items() for k, f in enumerate(given)],
)
def test_what_could_differ_is_refused_when_the_rule_is_defined(hint, compute):
    with pytest.raises(RuleError, match=hint):
        defined(lambda step, lr, beta: {"x": compute(step, lr, beta)})


def test_the_error_names_the_function_and_what_was_written():
    def my_scalars(step, lr):
        return {"x": lr if step == 1 else 0.0}

    with pytest.raises(RuleError, match=r"rule sgd .*my_scalars, line \d+: `if`.*write where\(condition, a, b\)"):
        defined(my_scalars)


def test_a_scalar_that_is_not_returned():
    with pytest.raises(RuleError, match="does not return x, which the rule asks for"):
        defined(lambda step, lr: {"y": lr})


def returns_nothing(step, lr):
    {"x": lr}  # noqa: B018  the return is forgotten


@pytest.mark.parametrize(
    ("scalars", "kind"),
    [
        (lambda step, lr: (lr,), "a tuple"),
        (lambda step, lr: [("x", lr)], "a list"),
        (lambda step, lr: lr, "one number"),
        (returns_nothing, "nothing"),
    ],
    ids=["tuple", "list", "number", "nothing"],
)
def test_scalars_that_are_not_a_dict(scalars, kind):
    with pytest.raises(RuleError, match=f"its scalars, .*: it returns {kind}; it must return a dict of the rule's"):
        defined(scalars)


def test_scalars_that_are_not_a_function():
    with pytest.raises(TypeError, match=r"scalars={'x': 1.0} is a dict; it must be a function that returns a dict"):
        defined({"x": 1.0})


def by_choice(step, lr, kind: Literal["plain", "bad"]):
    return {"x": lr if kind == "plain" else math.sqrt(lr)}


def by_name(step, lr, kind: str):
    return {"x": lr}


def test_every_choice_is_tried():
    with pytest.raises(RuleError, match="a function of math"):
        defined(by_choice)
    with pytest.raises(RuleError, match="Literal"):
        defined(by_name)


def test_functions_that_are_wrapped():
    def plain(step, lr):
        return {"x": lr * 0.5**step}

    @functools.wraps(plain)
    def wrapped(*args, **kwargs):
        return plain(*args, **kwargs)

    assert defined(wrapped).scalars(step=1, lr=1.0)["x"] == 0.5
    assert defined(functools.partial(by_choice_of_two, kind="plain")).scalars(step=1, lr=1.0)["x"] == 1.0


def by_choice_of_two(step, lr, kind: Literal["plain", "double"]):
    return {"x": lr if kind == "plain" else 2 * lr}
