"""A condition is not a number: backends would disagree about its value. Each is refused where the other belongs."""

from __future__ import annotations

import re

import pytest

from fusedadam.rules.clipping import tensor_norm
from fusedadam.rules.ops import divide, largest, maximum, row_sum, sqrt, tensor_sum, where
from fusedadam.rules.rule import RuleError
from fusedadam.rules.tracing import NotOnBothSides, check
from tests.rules.written import HELPERS, written
from tests.support import F32, Case, apply, assert_same_bits, draw

REFUSED = [
    ("m = (param > 0) + (grad > 0) + 0.0 * m", "`param > 0` is a condition, not a number; write `where(param > 0, 1.0"),
    ("m = (grad > 0) - (grad < 0)", "`grad > 0` is a condition"),
    ("m = m * (grad > 0)", "`grad > 0` is a condition"),
    ("m = m / (grad > 0)", "`grad > 0` is a condition"),
    ("m = sqrt(grad > 0) + m", "`sqrt(grad > 0)`: `grad > 0` is a condition"),
    ("m = maximum(m, grad > 0)", "`grad > 0` is a condition"),
    ("m = power(grad > 0, 2.0)", "`grad > 0` is a condition"),
    ("m = sign(grad > 0)", "`sign(grad > 0)`: `grad > 0` is a condition"),
    ("m = clamp(grad > 0, 0.0, m)", "`grad > 0` is a condition"),
    ("m = -(grad > 0)", "`grad > 0` is a condition"),
    ("m = m + tensor_sum(grad > 0)", "`tensor_sum(grad > 0)`: `grad > 0` is a condition"),
    ("m = m + tensor_norm(grad > 0)", "`tensor_norm(grad > 0)`: `grad > 0` is a condition"),
    ("m = m + row_sum(grad > 0)", "`grad > 0` is a condition"),
    ("m = grad > 0", "`(param, m)`: `m` is a condition"),
    ("m = (grad > 0) & (m > 0)", "`m` is a condition"),
    ("m = where(grad > 0, m > 0, m < 0)", "`m` is a condition"),
    ("m = is_positive(grad)", "`m` is a condition"),
    ("up = grad > 0\nm = m + up", "`up` is a condition"),
    ("up = is_positive(grad)\nm = m + up", "`up` is a condition"),
    ("up, x = both(grad)\nm = m + up", "`up` is a condition"),
    ("m = m + is_positive(grad)", "`is_positive(grad)` is a condition"),
    ("m = twice(grad > 0)", "rule twice (<rule"),
    ("m = where(grad > 0, grad > m, 0.0)", "`grad > m` is a condition"),
    ("m = where((grad > 0) == (m > 0), m, grad)", "`grad > 0` is a condition"),
    ("m = where((grad > 0) > 0, m, grad)", "`grad > 0` is a condition"),
    ("m = where(grad, m, 0.0)", "`grad` is not a condition; compare it, as in `grad > 0`"),
    ("m = where((grad > 0) & m, m, 0.0)", "`m` is not a condition"),
    ("m = where((grad > 0) & s, m, 0.0)", "`(grad > 0) & s`: `s` is not a condition; compare it, as in `s > 0`"),
    ("m = where(1.0 | (grad > 0), m, 0.0)", "`1.0` is not a condition"),
    ("up = grad > 0\nup = where(up, 1.0, 0.0)\nm = where(up, m, 0.0)", "`up` is not a condition"),
    ("if f:\n    m = where(s, m, grad)", "`s` is not a condition"),
    ("m = where(1.0, m, grad)", "`1.0` is not a condition"),
    ("m = where(tensor_sum(grad), m, grad)", "`tensor_sum(grad)` is not a condition"),
    ("m = where(where(grad > 0, m, grad), m, 0.0)", "is not a condition"),
    ("m = where(twice(grad), m, 0.0)", "`twice(grad)` is not a condition"),
    ("m = norm_if(grad, m) + m", "`condition` is not a condition"),
    ("up, x = both(grad)\nm = where(x, m, grad)", "`x` is not a condition"),
    ("m = where(~(grad > 0), m, grad)", "nothing negates a condition; exchange the sides of where"),
    ("m = where(not grad > 0, m, grad)", "nothing negates a condition"),
    ("if f and not g:\n    m = m * (grad > 0)", "`grad > 0` is a condition"),
    ("if f and not g:\n    up = grad > 0\n    m = m * up", "`up` is a condition"),
    ("if f:\n    m = grad > 0", "`m` is a condition"),
    ("m = both(grad)", "names on the left: 1; values on the right: 2"),
    ("m = m + both(grad)", "`both(grad)` has 2 values; assign them to names first"),
    ("m, x = twice(grad)", "names on the left: 2; values on the right: 1"),
    ("m = where(grad > 0, m)", "its arguments are condition, a, b"),
]


@pytest.mark.parametrize(("body", "says"), REFUSED, ids=[body for body, _ in REFUSED])
def test_refused(body, says):
    with pytest.raises(RuleError) as caught:
        written(body)
    assert says in str(caught.value)
    line = int(re.search(r"<rule \d+>:(\d+)\)", str(caught.value)).group(1))
    assert line > HELPERS.count("\n") or "twice" in says or "norm_if" in body  # which point at the helper


def test_a_report_is_a_number():
    with pytest.raises(RuleError, match="`large` is a condition"):
        written("large = tensor_sum(grad * grad) > 1\nm = where(large, m, grad)", reports=("large",))


ACCEPTED = [
    "m = where(grad > 0, m, grad)",
    "up = (grad > 0) & is_positive(m)\nm = where(up | (m < 0), m, grad)",
    "up = where(grad > 0, m > 0, is_positive(param))\nm = where(up, m, grad)",
    "if f:\n    x = grad > 0\nelse:\n    x = grad\nif f:\n    m = where(x, m, grad)\nelse:\n    m = m + x",
    "x = (grad > 0) if f else grad\nm = where(x, m, grad) if f else m + x",
    "grad = grad > 0\nm = where(grad, m, param)",
    "up, x = both(tensor_sum(grad))\nm = where(up, m, grad * x)",
    "m = norm_if(grad > 0, m) * m",
    "m = twice(where(grad > 0, 1.0, 0.0)) + one()",
]


@pytest.mark.parametrize("body", ACCEPTED)
def test_accepted(body):
    one = written(f"{body}\nparam = param - m")
    for f in (False, True):
        case = Case(one, {"f": f}, {})
        roles = draw(case, [(5, 7)], [F32])
        assert_same_bits(*(apply(case, roles, ("cpu", backend)) for backend in ("eager", "numba")))


SCALARS = {
    "a comparison is a condition, not a number; write where": [
        lambda step, lr: step == 1,
        lambda step, lr: (step > 1) & (lr > 0),
        lambda step, lr: where(step > 1, step < 9, lr > 0),
        lambda step, lr: (step > 3) * lr,
        lambda step, lr: -(step > 3),
        lambda step, lr: sqrt(step > 1),
        lambda step, lr: maximum(step > 1, 0.5),
        lambda step, lr: divide(step > 1, lr),
        lambda step, lr: where(step > 1, lr > 0, 0.0),
        lambda step, lr: where((step > 1) == (lr > 0), lr, 0.0),
    ],
    "is a number; compare it": [lambda step, lr: where(lr, 1.0, 0.0), lambda step, lr: where(1.0, lr, 0.0)],
    "nothing negates a condition; exchange the sides": [lambda step, lr: where(~(step > 1), lr, 0.0)],
    "`.sum`, of a scalar: it is one number": [lambda step, lr: tensor_sum(lr), lambda step, lr: tensor_norm(lr)],
    "of a scalar: it is one number, and the rule is what sums": [
        lambda step, lr: row_sum(lr),
        lambda step, lr: largest(step),
        lambda step, lr: lr.item(),
    ],
}


@pytest.mark.parametrize(("says", "compute"), [(says, one) for says, given in SCALARS.items() for one in given])
def test_refused_in_scalars(says, compute):
    with pytest.raises(NotOnBothSides) as caught:
        check(lambda step, lr: {"x": compute(step, lr)}, ["x"])
    assert says in str(caught.value)


def test_conditions_in_scalars_choose():
    check(lambda step, lr: {"x": where(where(step > 1, step < 9, lr > 0), lr, where(True, lr, 0.0))}, ["x"])


@pytest.mark.parametrize(
    ("helpers", "says"),
    [
        ("def a(x):\n    return a(x)\n", "`a(x)`: a helper cannot call itself"),
        (
            "def a(x):\n    return b(x)\ndef b(x):\n    return a(x)\n",
            "`a(x)`: a helper cannot call itself, nor the one",
        ),
        ("def a(x):\n    return a(x) + tensor_sum(x)\n", "`a(x)`: a helper cannot call itself"),
    ],
)
def test_a_helper_that_calls_itself(helpers, says):
    with pytest.raises(RuleError, match=re.escape(says)):
        written("param = a(grad)", helpers=helpers)
