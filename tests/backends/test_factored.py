"""States smaller than their parameter: does every backend compute them, against float64 and against each other?"""

from __future__ import annotations

import pytest
import torch

from fusedadam import OPTIONS, FusedOptimizer, State
from fusedadam.ops import largest, maximum, sqrt, sum_last, sum_second_last, tensor_sum, total
from fusedadam.rules.clipping import clipped_by_norm
from fusedadam.rules.rule import ColumnValue, RowValue, Scalar, TensorValue, Value, Values, rule
from tests.backends.test_storage import assert_same, trained
from tests.support import (
    BF16,
    F16,
    F32,
    F64,
    PLACES,
    QUICK_PLACES,
    Case,
    apply,
    assert_same_bits,
    assert_scaled_and_skipped,
    available,
    draw,
    exact,
    threads,
)

# one row, one column, more rows than a segment of a column has, rows longer than a segment, many small matrices
SHAPES = [(5, 7), (1, 9), (9, 1), (70, 3), (130, 33), (1100, 2), (2, 8200), (300, 3, 3), (2, 3, 65, 4)]
SMALL = [(5, 7), (66, 2), (3, 2, 3), (1, 1)]  # for the interpreter
# nothing at all, beside matrices whose columns have several segments
EMPTY = [(0, 4), (70, 3), (4, 0), (2, 0, 3), (0, 3, 3)]


def scalars(step, lr):
    return {"lr": lr}


@rule(scalars=scalars)
def together(
    param: Value, grad: Value, row: RowValue, column: ColumnValue, whole: TensorValue, *, lr: Scalar, numel: Scalar,
    last_length: Scalar, second_last_length: Scalar, dtype_eps: Scalar,
) -> Values:  # fmt: skip
    row = row + 0.25 * (sum_last(grad * grad) / last_length - row)
    column = column + 0.25 * (sum_second_last(grad * grad) / second_last_length - column)
    whole = 0.5 * whole + tensor_sum(row) / numel
    param = param - lr * grad / (sqrt(row * column) + whole + dtype_eps)
    return param, row, column, whole


@rule(scalars=scalars)
def old_and_new(
    param: Value, grad: Value, row: RowValue, column: ColumnValue, whole: TensorValue, *, lr: Scalar, numel: Scalar
) -> Values:
    before_row, before_column, before_whole = row, column, whole
    row = 0.5 * row + sum_last(grad * grad)
    column = 0.5 * column + sum_second_last(grad * grad)
    whole = 0.5 * whole + tensor_sum(grad * grad) / numel
    update = grad / sqrt(row * column + before_row * before_column)
    size = sqrt(tensor_sum(update * update) / numel)
    param = param - lr * update / (size + before_whole + before_row * whole + before_column)
    return param, row, column, whole


@rule(scalars=scalars)
def by_the_tensor(
    param: Value, grad: Value, row: RowValue, column: ColumnValue, *, lr: Scalar, numel: Scalar
) -> Values:
    row = 0.5 * row + tensor_sum(grad * grad) / numel
    column = lr * 2.0
    param = param - lr * grad * row / column
    return param, row, column


@rule(scalars=scalars)
def each_in_the_others_sum(
    param: Value, grad: Value, row: RowValue, column: ColumnValue, average: Value, *, lr: Scalar
) -> Values:
    row = 0.5 * row + sum_last(grad * grad * column)
    average = average + 0.25 * (grad - average)
    column = 0.5 * column + sum_second_last(average * average / (1.0 + row))
    mean = sum_second_last(row) + sum_second_last(row * row)
    param = param - lr * average / sqrt(row * column + mean)
    return param, row, column, average


@rule(scalars=lambda step, lr: {"lr": lr, "max_grad_norm": 0.5}, reports=("top", "everything"))
def over_all(
    param: Value, grad: Value, row: RowValue, column: ColumnValue, whole: TensorValue, *, lr: Scalar,
    max_grad_norm: Scalar,
) -> Values:  # fmt: skip
    grad, grad_norm = clipped_by_norm(grad, max_grad_norm)
    row = maximum(row * 0.5, sum_last(grad * grad))
    column = maximum(column * 0.5, sum_second_last(grad * grad))
    top = largest(row)
    everything = total(row)
    whole = whole * 0.5 + top
    param = param - lr * grad * (row + column) / (top + 1e-3 * (everything + grad_norm))
    return param, row, column, whole


@rule(scalars=scalars)
def only_a_number(param: Value, grad: Value, whole: TensorValue, *, lr: Scalar) -> Values:
    before = whole
    whole = 0.5 * whole + lr
    param = param - whole * grad + before * lr
    return param, whole


RULES = [together, old_and_new, by_the_tensor, each_in_the_others_sum, over_all, only_a_number]
CASES = [Case(each, {}, {"lr": 0.25}) for each in RULES]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def close(found, expected, rtol):
    for k, (own, want) in enumerate(zip(found, expected, strict=True)):
        for role, value in want.items():
            torch.testing.assert_close(
                own[role].double(),
                value.expand_as(own[role]),
                rtol=rtol,
                atol=rtol,
                msg=lambda m, r=role, k=k: f"{r} of tensor {k}: {m}",
            )


@EVERY
@pytest.mark.parametrize(("dtype", "rtol"), [(F64, 1e-12), (F32, 1e-5), (BF16, 1e-2), (F16, 2e-3)], ids=str)
@pytest.mark.parametrize("backend", ["eager", pytest.param("numba", marks=pytest.mark.exhaustive)])  # the same bits
def test_float64(case, dtype, rtol, backend):
    for shape in SHAPES:  # one at a time: what sums over all knows one parameter only, in float64
        roles = draw(case, [shape], [dtype])
        close(apply(case, roles, ("cpu", backend)), exact(case, roles), rtol)


# every rule in one of three mixes, and in all of them in the exhaustive tests
MIXES = [[F32], [F64], [BF16, F32, F32, F16]]
CASES_AND_DTYPES = [
    pytest.param(case, mix, id=f"{mix}-{case.id}", marks=[pytest.mark.exhaustive] if (j + k) % 3 else [])
    for j, mix in enumerate(MIXES)
    for k, case in enumerate(CASES)
]


@pytest.mark.parametrize(("case", "dtypes"), CASES_AND_DTYPES)
def test_all_backends_give_the_same_bits(case, dtypes):
    roles, small = draw(case, SHAPES, dtypes, seed=1), draw(case, SMALL, dtypes, seed=2)
    assert_same_bits(apply(case, roles, ("cpu", "eager")), apply(case, roles, ("cpu", "numba")))
    first = apply(case, small, available()[0])
    assert not torch.equal(first[0]["param"], small[0]["param"])
    for place in available()[1:]:
        assert_same_bits(first, apply(case, small, place), f"{place}:")


@EVERY
def test_parameters_without_elements_keep_their_states(case):
    roles = draw(case, EMPTY, [F32])
    results = [apply(case, roles, place) for place in available()]
    for found in results:
        assert_same_bits(results[0], found)
        for k, own in enumerate(found):
            if not own["param"].numel():
                for role in own.keys() & {"row", "column"}:
                    assert torch.equal(own[role], roles[k][role])


@pytest.mark.parametrize(
    ("case", "place"),
    [
        pytest.param(case, *place.values, id=f"{place.id}-{case.id}", marks=place.marks)
        for case in CASES
        for place in (PLACES if case.rule is over_all else QUICK_PLACES)
    ],
)
def test_a_skipped_step_changes_nothing(case, place):
    assert_scaled_and_skipped(case, draw(case, SMALL, [F32], seed=3), place)


@EVERY
def test_any_number_of_threads_gives_the_same_bits(case):
    roles = draw(case, [(300, 310), (40_000, 2)], [F32])
    one = apply(case, roles, ("cpu", "eager"))
    for count in (1, 2, 3):
        with threads(count):
            assert_same_bits(one, apply(case, roles, ("cpu", "numba")))


@EVERY
def test_other_strides(case):
    """Rows and columns are those of the parameter, not of its memory."""
    roles = draw(case, [(6, 70), (5, 4, 3)], [F32], seed=4)
    expected = apply(case, roles, ("cpu", "eager"))
    turned = [
        {**own, "param": own["param"].mT.contiguous().mT, "grad": own["grad"].mT.contiguous().mT} for own in roles
    ]
    for place in available():
        assert_same_bits(expected, apply(case, turned, place))


class EachInTheOthersSum(FusedOptimizer):
    rule = each_in_the_others_sum
    states = {"row": State(signed=False), "column": State(signed=False), "average": State(decay="kept")}
    options = OPTIONS
    fixed = {"kept": 0.75}

    def __init__(self, params, lr=0.25, **common):
        super().__init__(params, lr=lr, **common)


@pytest.mark.parametrize(
    ("storage", "dtype"),
    [
        pytest.param(storage, dtype, marks=[] if (storage == "16bit") is (dtype == F32) else [pytest.mark.exhaustive])
        for storage in ("exact", "16bit", "8bit")
        for dtype in (F32, BF16)
    ],
    ids=str,
)
def test_states_by_element_in_storage_formats(storage, dtype):
    """A format by block in the visit that goes down columns, in one with sums by row, and in the last one."""
    shapes, small = [(70, 96), (2, 33, 64), (4, 1056), (33, 40)], [(64, 64)]
    expected = trained(EachInTheOthersSum, storage, ("cpu", "eager"), dtype, shapes)
    assert any(name.endswith(("_codes", "_steps")) for name in expected[0]) is (storage == "8bit")
    assert expected[0]["row"].dtype == expected[0]["column"].dtype == F32
    assert_same(trained(EachInTheOthersSum, storage, ("cpu", "numba"), dtype, shapes), expected)
    expected = trained(EachInTheOthersSum, storage, ("cpu", "eager"), dtype, small, steps=1)
    for place in available()[1:]:
        assert_same(trained(EachInTheOthersSum, storage, place, dtype, small, steps=1), expected)


@pytest.mark.parametrize("shape", [(5,), ()], ids=str)
def test_a_parameter_without_rows_and_columns_is_refused_before_anything_is_written(shape):
    params = [torch.nn.Parameter(torch.ones(each)) for each in ((3, 4), shape)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = EachInTheOthersSum(params)
    with pytest.raises(ValueError, match="without rows and columns, for which the rule each_in_the_others_sum has"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(3, 4))
    assert not optimizer.state


def test_a_small_state_cannot_begin_as_a_copy_of_the_parameter():
    with pytest.raises(
        TypeError, match=r"states\['whole'\] begins as a copy of the parameter, and has one value for each"
    ):

        class Copies(FusedOptimizer):
            rule = only_a_number
            states = {"whole": State(initial="param")}
            options = OPTIONS


@rule(scalars=scalars)
def by_the_matrix(param: Value, grad: Value, *, lr: Scalar) -> Values:
    param = param - lr * grad / sum_second_last(sum_last(grad * grad))
    return param


@pytest.mark.parametrize("place", available(), ids=str)
def test_rows_that_are_only_added_up(place):
    """Their visit has nothing to compute; its kernel was a syntax error."""
    case = Case(by_the_matrix, {}, {"lr": 0.25})
    roles = draw(case, SMALL, [F64])
    sizes = [own["grad"].square().sum((-2, -1), keepdim=True) for own in roles]
    expected = [{"param": own["param"] - 0.25 * own["grad"] / n} for own, n in zip(roles, sizes, strict=True)]
    close(apply(case, roles, place), expected, 1e-12)
