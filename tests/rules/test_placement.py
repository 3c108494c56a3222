"""What may be summed and reported, and what is refused."""

from __future__ import annotations

import pytest

from fusedadam.rules.ops import row_sum, sum_last, sum_second_last, tensor_sum, total, where
from fusedadam.rules.rule import ColumnValue, Flag, RowValue, RuleError, Scalar, TensorValue, Value, Values, rule


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


def bad_row_of_elements(param: Value, grad: Value, row: RowValue) -> Values:
    row = row + grad * grad
    return param, row


def bad_row_of_columns(param: Value, grad: Value, row: RowValue) -> Values:
    row = row + sum_second_last(grad)
    return param, row


def bad_tensor_of_rows(param: Value, grad: Value, whole: TensorValue) -> Values:
    whole = whole + sum_last(grad)
    return param, whole


def bad_both_kinds_of_rows(param: Value, grad: Value) -> Values:
    param = param * row_sum(grad) + sum_last(grad)
    return param


def bad_rows_beside_a_state(param: Value, grad: Value, column: ColumnValue) -> Values:
    column = column * 0.5
    param = param * row_sum(grad) + column
    return param, column


def bad_sum_of_columns(param: Value, grad: Value, column: ColumnValue) -> Values:
    column = sum_second_last(grad)
    param = param * tensor_sum(column)
    return param, column


def bad_last_of_rows(param: Value, grad: Value, row: RowValue) -> Values:
    row = sum_last(grad) + sum_last(row)
    return param, row


def bad_param_by_row(param: RowValue, grad: Value) -> Values:
    param = param * 0.5
    return param


def bad_grad_by_tensor(param: Value, grad: TensorValue) -> Values:
    param = param - grad
    return param


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (bad_nothing_to_sum, "nothing to sum"),
        (bad_rows_of_rows, "nothing to sum"),
        (bad_tensor_of_tensor, "nothing to sum"),
        (bad_two_arguments, "its arguments are x"),
        (bad_other_round, "another round"),
        (bad_row_of_elements, "the state `row` has one value for each row, and is assigned one for each element; sum"),
        (bad_row_of_columns, "the state `row` has one value for each row, and is assigned one for each element"),
        (bad_tensor_of_rows, "the state `whole` has one value for each tensor, and is assigned one for each row"),
        (bad_both_kinds_of_rows, r"test_placement.py:\d+\): `row_sum\(grad\)`: row_sum is over all dimensions but"),
        (bad_rows_beside_a_state, r"`row_sum\(grad\)`: row_sum is over all dimensions but the first"),
        (bad_sum_of_columns, r"`tensor_sum\(column\)`: a value by column cannot be summed"),
        (bad_last_of_rows, r"`sum_last\(row\)`: there is nothing to sum"),
        (bad_param_by_row, "`param` has a value for each element; write `param: Value`"),
        (bad_grad_by_tensor, "`grad` has a value for each element; write `grad: Value`"),
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


def test_the_line_of_a_sum_that_is_refused_is_its_own():
    with pytest.raises(RuleError) as caught:
        rule(scalars=lambda step: {})(bad_sum_of_columns)
    line = bad_sum_of_columns.__code__.co_firstlineno + 2
    assert f"test_placement.py:{line})" in str(caught.value)
