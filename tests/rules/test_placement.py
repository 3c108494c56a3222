"""What may be summed and reported, and what is refused."""

from __future__ import annotations

import re

import pytest

from fusedadam.rules.rule import RuleError
from tests.rules.written import HELPERS, written

REFUSED = [
    ("", "param = param * tensor_sum(s)", "nothing to sum"),
    ("", "param = param * row_sum(row_sum(grad))", "nothing to sum"),
    ("", "param = param * tensor_sum(tensor_sum(grad) * 2.0)", "nothing to sum"),
    ("", "param = param * tensor_sum(grad, param)", "its arguments are x"),
    ("", "x = tensor_sum(grad) if f else 1.0\nparam = total(where(grad > x, grad, 0.0))", "another round"),
    (
        "row: RowValue", "row = row + grad * grad",
        "the state `row` has one value for each row, and is assigned one for each element; sum",
    ),
    (
        "row: RowValue", "row = row + sum_second_last(grad)",
        "the state `row` has one value for each row, and is assigned one for each element",
    ),
    (
        "whole: TensorValue", "whole = whole + sum_last(grad)",
        "the state `whole` has one value for each tensor, and is assigned one for each row",
    ),
    (
        "", "param = param * row_sum(grad) + sum_last(grad)",
        "`row_sum(grad)`: row_sum is over all dimensions but",
    ),
    (
        "column: ColumnValue", "column = column * 0.5\nparam = param * row_sum(grad) + column",
        "`row_sum(grad)`: row_sum is over all dimensions but the first",
    ),
    (
        "column: ColumnValue", "column = sum_second_last(grad)\nparam = param * tensor_sum(column)",
        "`tensor_sum(column)`: a value by column cannot be summed",
    ),
    ("row: RowValue", "row = sum_last(grad) + sum_last(row)", "`sum_last(row)`: there is nothing to sum"),
    ("", "param = orthogonalized(grad) + orthogonalized(param)", "orthogonalize once"),
    ("", "param = param + orthogonalized(s)", "`orthogonalized(s)`: it is a number"),
    ("", "param = param + orthogonalized(row_sum(grad))", "it has one value for each row; orthogonalize a value by el"),
    (
        "", "update = orthogonalized(grad)\nparam = param + update * total(grad)",
        "`total(grad)`: a sum over several parameters cannot follow `orthogonalized`",
    ),
    ("", "param = param + orthogonalized(grad) * group_sum(param)", "cannot follow `orthogonalized`"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "body", "says"), REFUSED, ids=[body for _, body, _ in REFUSED])
def test_refused_in_words(state, body, says):
    arguments = f"param: Value, grad: Value, {state or 'm: Value'}, *, s: Scalar, f: Flag"
    returned = f"param, {state.partition(':')[0]}" if state else "param"
    with pytest.raises(RuleError, match=rf"rule made_up \(<rule \d+>:\d+\): .*{re.escape(says)}") as caught:
        written(body, arguments, returned)
    if "tensor_sum(column)" in body:  # the line of a sum that is refused is its own
        assert f":{HELPERS.count(chr(10)) + 3})" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("param: RowValue, grad: Value", "`param` has a value for each element; write `param: Value`"),
        ("param: Value, grad: TensorValue", "`grad` has a value for each element; write `grad: Value`"),
    ],
)
def test_param_and_grad_have_a_value_for_each_element(arguments, says):
    with pytest.raises(RuleError, match=says):
        written("param = param * 0.5", arguments, "param")


@pytest.mark.parametrize("report", ["by_row", "by_element", "of_scalars"])
def test_only_values_by_tensor_can_be_reported(report):
    with pytest.raises(RuleError, match="cannot be reported"):
        written("by_row, by_element, of_scalars = row_sum(grad), grad * s, 2.0 * s", returned="param", reports=[report])
