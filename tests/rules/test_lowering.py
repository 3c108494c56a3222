"""What a rule and its helpers may say, and what is refused, with the line and what to write instead."""

from __future__ import annotations

import pytest
import torch

from fusedadam.rules.ops import log, maximum, row_sum, sqrt, tensor_sum, total, where
from fusedadam.rules.rule import Flag, RuleError, Scalar, Value, Values, rule
from tests.support import F32, F64, Case, apply, assert_same_bits, draw


def no_scalars(step):
    return {}


def some_scalars(step):
    return dict.fromkeys(("s", "t"), 1.0)


def bad_in_place(param: Value, grad: Value) -> Values:
    param -= grad
    return param


def bad_if(param: Value, grad: Value) -> Values:
    if grad > 0:
        param = param - grad
    return param


def bad_power(param: Value, grad: Value) -> Values:
    param = param - grad**2
    return param


def bad_word(param: Value, grad: Value) -> Values:
    param = torch.exp(grad)
    return param


def bad_loop(param: Value, grad: Value) -> Values:
    for _ in range(3):
        param = param - grad
    return param


def bad_name(param: Value, grad: Value) -> Values:
    param = param - nowhere  # noqa: F821
    return param


def bad_return(param: Value, grad: Value) -> Values:
    return param - grad


def bad_grad(param: Value, grad: Value) -> Values:
    grad = -grad
    return param, grad


def bad_scalar(param: Value, grad: Value, *, s: Scalar) -> Values:
    s = s + s
    param = param - s
    return param


def bad_flag(param: Value, grad: Value, *, f: Flag) -> Values:
    param = param - f
    return param


def bad_annotation(param: Value, grad) -> Values:
    return param


def bad_roles(weight: Value, grad: Value) -> Values:
    return weight


def bad_keyword(param: Value, grad: Value) -> Values:
    param = maximum(param, b=grad)
    return param


def bad_unassigned(param: Value, grad: Value, *, f: Flag) -> Values:
    if f:
        x = grad
    param = param - x
    return param


def bad_argument(param: Value, grad: Value, table: Value) -> Values:
    return param


def bad_op_argument(param: Value, grad: Value, *, int64_at: Scalar) -> Values:
    param = param - int64_at * grad
    return param


def bad_local(param: Value, grad: Value) -> Values:
    divide = param
    param = divide
    return param


def bad_string(param: Value, grad: Value) -> Values:
    param = "param"
    return param


def bad_choice(param: Value, grad: Value) -> Values:
    param = where(grad, param, 0.0)
    return param


def bad_named_choice(param: Value, grad: Value) -> Values:
    chosen = grad > 0
    chosen = where(chosen, 1.0, 0.0)
    param = where(chosen, param, 0.0)
    return param


def bad_scalar_choice(param: Value, grad: Value, *, s: Scalar, f: Flag) -> Values:
    if f:
        param = where(s, param, grad)
    return param


def bad_constant_choice(param: Value, grad: Value) -> Values:
    param = where(1.0, param, grad)
    return param


def bad_choice_by_sum(param: Value, grad: Value) -> Values:
    param = where(tensor_sum(grad), param, grad)
    return param


def difference(x, y):
    return x - y


def bad_choice_by_helper(param: Value, grad: Value) -> Values:
    param = where(difference(param, grad), param, grad)
    return param


def bad_joined_scalar(param: Value, grad: Value, *, s: Scalar) -> Values:
    param = where((grad > 0) & s, param, grad)
    return param


def bad_joined_number(param: Value, grad: Value) -> Values:
    param = where(1.0 | (grad > 0), param, grad)
    return param


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (bad_joined_scalar, "`(grad > 0) & s`: `s` is not a condition; compare it, as in `s > 0`"),
        (bad_joined_number, "`1.0` is not a condition"),
        (bad_choice, "`grad` is not a condition; compare it, as in `grad > 0`"),
        (bad_named_choice, "`chosen` is not a condition"),
        (bad_scalar_choice, "`s` is not a condition"),
        (bad_constant_choice, "`1.0` is not a condition"),
        (bad_choice_by_sum, "`tensor_sum(grad)` is not a condition"),
        (bad_choice_by_helper, "`difference(param, grad)` is not a condition"),
        (bad_in_place, "write `x = x + y`"),
        (bad_if, "where("),
        (bad_power, "write `grad * grad`"),
        (bad_word, "neither an op"),
        (bad_loop, "only assignments"),
        (bad_name, "`nowhere` is not known"),
        (bad_return, "return roles by name"),
        (bad_grad, "`grad` belongs to the user"),
        (bad_scalar, "`s` is a scalar"),
        (bad_flag, "ask it with `if`"),
        (bad_annotation, "say what `grad` is"),
        (bad_roles, "`param: Value, grad: Value`"),
        (bad_keyword, "by position"),
        (bad_unassigned, "`x` is not known"),
        (bad_string, "not a number"),
        (bad_argument, "`table` is a name that kernels use"),
        (bad_op_argument, "`int64_at` is a name that kernels use"),
        (bad_local, "`divide` is taken"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused_with_the_line_and_what_to_write_instead(function, says):
    with pytest.raises(RuleError) as caught:
        rule(scalars=some_scalars)(function)
    assert says in str(caught.value)
    assert f"{function.__name__} ({__file__}:" in str(caught.value)
    line = int(str(caught.value).split(f"{__file__}:")[1].split(")")[0])
    assert function.__code__.co_firstlineno <= line <= function.__code__.co_firstlineno + 4


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


def bad_helper_of_scalars(s):
    return tensor_sum(s)


def bad_helper_of_two(x):
    y = tensor_sum(x, x)
    return y


def bad_helper_in_place(x):
    x += tensor_sum(x)
    return x


def sum_of_a_scalar(param: Value, grad: Value, *, s: Scalar) -> Values:
    param = param * bad_helper_of_scalars(s)
    return param


def two_arguments(param: Value, grad: Value) -> Values:
    param = param * bad_helper_of_two(grad)
    return param


def in_place(param: Value, grad: Value) -> Values:
    param = param * bad_helper_in_place(grad)
    return param


@pytest.mark.parametrize(
    ("function", "helper", "says"),
    [
        (sum_of_a_scalar, bad_helper_of_scalars, "nothing to sum"),
        (two_arguments, bad_helper_of_two, "its arguments are x"),
        (in_place, bad_helper_in_place, "write `x = x + y`"),
    ],
)
def test_an_error_in_a_helper_points_at_its_own_line(function, helper, says):
    with pytest.raises(RuleError) as caught:
        rule(scalars=some_scalars)(function)
    assert says in str(caught.value)
    assert f"{helper.__name__} ({__file__}:{helper.__code__.co_firstlineno + 1})" in str(caught.value)


def too_few(param: Value, grad: Value) -> Values:
    param, _grad = normalised(grad)
    return param


def too_many_names(param: Value, grad: Value, *, s: Scalar) -> Values:
    param, a, b = normalised(grad, s)  # noqa: RUF059
    return param


@pytest.mark.parametrize(
    ("function", "says"),
    [(too_few, "arguments are x, eps"), (too_many_names, "names on the left: 3; values on the right: 2")],
)
def test_arguments_and_results_of_a_helper_are_counted(function, says):
    with pytest.raises(RuleError, match=says):
        rule(scalars=some_scalars)(function)


def takes_a_logarithm(param: Value, grad: Value) -> Values:
    param = param - log(grad)
    return param


def test_functions_for_scalars_are_refused_in_the_authors_own_line():
    """The error was about a line of this package."""
    with pytest.raises(RuleError, match=r"takes_a_logarithm .*`log\(grad\)` is for scalars only; compute it there"):
        rule(scalars=lambda step: {})(takes_a_logarithm)
