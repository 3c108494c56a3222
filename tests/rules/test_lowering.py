"""What a rule and its helpers may say, and what is refused, with the line and what to write instead."""

from __future__ import annotations

import re

import pytest
import torch

from fusedadam.rules.ops import maximum, row_sum, sqrt, tensor_sum, total, where
from fusedadam.rules.rule import Flag, RuleError, Scalar, Value, Values, rule
from tests.rules.written import ARGUMENTS, HELPERS, written
from tests.support import F32, F64, Case, apply, assert_same_bits, draw


def some_scalars(step):
    return dict.fromkeys(("s", "t"), 1.0)


REFUSED = [
    ("param -= grad", "write `x = x + y`"),
    ("if grad > 0:\n    param = param - grad", "where("),
    ("param = param - grad**2", "write `grad * grad`"),
    ("param = torch.exp(grad)", "neither an op"),
    ("for _ in range(3):\n    param = param - grad", "only assignments"),
    ("param = param - nowhere", "`nowhere` is not known"),
    ("s = s + s\nparam = param - s", "`s` is a scalar"),
    ("param = param - f", "ask it with `if`"),
    ("param = maximum(param, b=grad)", "by position"),
    ("if f:\n    x = grad\nparam = param - x", "`x` is not known"),
    ('param = "param"', "not a number"),
    ("divide = param\nparam = divide", "`divide` is taken"),
    ("param = norm_if(grad)", "arguments are condition, x"),
    ("param, a, b = both(grad)", "names on the left: 3; values on the right: 2"),
    # the error was about a line of this package
    ("param = param - log(grad)", "`log(grad)` is for scalars only; compute it there"),
]
REFUSED_SIGNATURES = [
    ("param: Value, grad: Value", "param - grad", "return roles by name"),
    ("param: Value, grad: Value", "param, grad", "`grad` belongs to the user"),
    ("param: Value, grad", "param", "say what `grad` is"),
    ("weight: Value, grad: Value", "weight", "`param: Value, grad: Value`"),
    ("param: Value, grad: Value, table: Value", "param", "`table` is a name that kernels use"),
    ("param: Value, grad: Value, *, int64_at: Scalar", "param", "`int64_at` is a name that kernels use"),
]


@pytest.mark.parametrize(
    ("body", "arguments", "returned", "says"),
    [
        *((body, ARGUMENTS, "param", says) for body, says in REFUSED),
        *(("grad = -grad", *own) for own in REFUSED_SIGNATURES),
    ],
)
def test_refused_with_the_line_and_what_to_write_instead(body, arguments, returned, says):
    with pytest.raises(RuleError) as caught:
        written(body, arguments, returned)
    assert says in str(caught.value)
    line = int(re.search(r"rule made_up \(<rule \d+>:(\d+)\)", str(caught.value))[1])
    assert HELPERS.count("\n") < line <= HELPERS.count("\n") + 5


def is_positive(x):
    result = x > 0
    return result


def chosen_by(condition, a, b):
    return where(condition, a, b)


def both_signs(x):
    return x > 0, x < 0


@rule(scalars=some_scalars)
def with_conditions(param: Value, grad: Value, *, s: Scalar, f: Flag) -> Values:
    """Every way to come by a condition."""
    by_name = is_positive(grad)
    if f:
        by_name = grad > s
    up, down = grad > 1, (grad < -1) | (param > 2)
    positive, negative = both_signs(param)
    param = where(by_name, param - 1, param)
    param = where(up & down, param, param + 2)
    param = where(up if f else down, param - 4, param)
    param = where(where(up, down, by_name), param - 8, param)
    param = chosen_by(positive, param - 16, param)
    param = where(chosen_by(negative, up, down), param - 32, param)
    return param


@pytest.mark.parametrize("f", [False, True])
def test_conditions_may_have_names_and_come_from_helpers(f):
    roles = draw(Case(with_conditions, {"f": f}, {}), [(5, 7)], [F64])
    results = [apply(Case(with_conditions, {"f": f}, {}), roles, ("cpu", backend)) for backend in ("eager", "numba")]
    assert_same_bits(*results)
    expected = with_conditions(roles[0]["param"], roles[0]["grad"], s=1.0, f=f)
    assert torch.equal(results[0][0]["param"], expected)


# helpers that sum


def root_of_squares(x):
    squares = x * x
    return sqrt(tensor_sum(squares))


def normalised(x, eps):
    norm = root_of_squares(x) + eps
    return x / norm, norm


def at_least_zero(x):
    return maximum(x, 0.0)


def growth_of_rows(x):
    x = row_sum(x)
    return total(at_least_zero(x))


@rule(scalars=some_scalars, reports=("norm", "rows"))
def with_helpers(param: Value, grad: Value, state: Value, *, s: Scalar, f: Flag) -> Values:
    """The same helper twice, one within another, and names that they and the rule have in common."""
    x, squares = grad, s
    if f:
        x, norm = normalised(x, s)  # noqa: RUF059  it is reported
    state = state + root_of_squares(state) * x
    rows = growth_of_rows(state)
    param = param - squares * x * root_of_squares(param) / rows
    return param, state


@rule(scalars=some_scalars, reports=("norm", "rows"))
def written_out(param: Value, grad: Value, state: Value, *, s: Scalar, f: Flag) -> Values:
    x = grad
    if f:
        norm = sqrt(tensor_sum(grad * grad)) + s
        x = grad / norm
    state = state + sqrt(tensor_sum(state * state)) * x
    rows = total(maximum(row_sum(state), 0.0))
    param = param - s * x * sqrt(tensor_sum(param * param)) / rows
    return param, state


@pytest.mark.parametrize(
    ("f", "dtype"),
    [(True, F32), (False, F64), *(pytest.param(*p, marks=pytest.mark.exhaustive) for p in ((True, F64), (False, F32)))],
    ids=str,
)
def test_a_helper_that_sums_is_as_if_it_were_written_out(f, dtype):
    roles = draw(Case(with_helpers, {"f": f}, {}), [(5, 7), (3, 300), (6,)], [dtype])
    for place in (("cpu", "eager"), ("cpu", "numba")):
        results = [apply(Case(one, {"f": f}, {}), roles, place) for one in (with_helpers, written_out)]
        assert_same_bits(*results)
    plain = with_helpers(*(roles[0][r].double() for r in ("param", "grad", "state")), s=1.0, f=f)
    (alone,) = apply(Case(with_helpers, {"f": f}, {}), roles[:1], ("cpu", "eager"))
    torch.testing.assert_close(alone["param"].double(), plain[0], rtol=1e-5, atol=1e-6)


def test_sums_of_helpers_have_names_of_their_own_and_the_same_under_all_flags():
    on, off = (with_helpers.specialize({"f": f}) for f in (True, False))
    names = [[one.name for stage in specialized.stages for one in stage.sums] for specialized in (on, off)]
    assert len(set(names[0])) == len(names[0])
    assert set(names[1]) < set(names[0])
    assert [one.name for one in on.shared] == [one.name for one in off.shared]


@pytest.mark.parametrize(
    ("body", "argument", "says"),
    [
        ("return tensor_sum(x)", "s", "nothing to sum"),
        ("return tensor_sum(x, x)", "grad", "its arguments are x"),
        ("x += tensor_sum(x)\n    return x", "grad", "write `x = x + y`"),
    ],
)
def test_an_error_in_a_helper_points_at_its_own_line(body, argument, says):
    with pytest.raises(RuleError) as caught:
        written(f"param = param * bad({argument})", returned="param", helpers=f"def bad(x):\n    {body}\n")
    assert says in str(caught.value)
    assert re.search(r"rule bad \(<rule \d+>:2\)", str(caught.value))
