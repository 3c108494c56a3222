"""What may be summed and reported, and what is refused."""

from __future__ import annotations

import pytest

from fusedadam.rules.ops import row_sum, tensor_sum, total, where
from fusedadam.rules.rule import Flag, RuleError, Scalar, Value, Values, rule


def bad_tensor_of_tensor(param: Value, grad: Value) -> Values:
    param = param * tensor_sum(tensor_sum(grad) * 2.0)
    return param


def bad_nothing_to_sum(param: Value, grad: Value, *, s: Scalar) -> Values:
    param = param * tensor_sum(s)
    return param


def bad_rows_of_rows(param: Value, grad: Value) -> Values:
    param = param * row_sum(row_sum(grad))
    return param


def bad_two_arguments(param: Value, grad: Value) -> Values:
    param = param * tensor_sum(grad, param)
    return param


def bad_other_round(param: Value, grad: Value, *, f: Flag) -> Values:
    scale = tensor_sum(grad) if f else 1.0
    param = param * total(where(grad > scale, grad, 0.0))
    return param


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (bad_nothing_to_sum, "nothing to sum"),
        (bad_rows_of_rows, "nothing to sum"),
        (bad_tensor_of_tensor, "nothing to sum"),
        (bad_two_arguments, "one argument"),
        (bad_other_round, "another round"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused_in_words(function, says):
    with pytest.raises(RuleError, match=says):
        rule(scalars=lambda step, s=0: {"s": s})(function)


@pytest.mark.parametrize("report", ["by_row", "by_element", "of_scalars"])
def test_only_values_by_tensor_can_be_reported(report):
    def reporting(param: Value, grad: Value, *, s: Scalar) -> Values:
        by_row, by_element, of_scalars = row_sum(grad), grad * s, s * 2.0  # noqa: F841
        return param

    with pytest.raises(RuleError, match="cannot be reported"):
        rule(scalars=lambda step: {"s": 1.0}, reports=(report,))(reporting)
