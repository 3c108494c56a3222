"""Bounds hold for the same operations in float32, and are not much larger than its errors."""

from __future__ import annotations

import operator

import pytest
import torch

from fusedadam.cli.verify import bounded
from fusedadam.cli.verify.bounded import MEANING, Bounded, Run
from fusedadam.rules import ops
from tests.support import F32, F64

COUNT = 4096


def drawn(seed: int, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)) * spread).abs() + 0.1


def with_error(seed: int) -> tuple[torch.Tensor, Bounded]:
    """A number in float32, and the exact one with a bound on their distance."""
    exact, value = drawn(seed).double(), drawn(seed) * (1 + 3e-7 * torch.randn(COUNT))
    return value, Bounded(Run(F32), exact, (value.double() - exact).abs())


OPERATIONS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "maximum": ops.maximum, "minimum": ops.minimum, "power": ops.power,
    "where": lambda a, b: ops.where(a > b, a, b),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_error_of_an_operation_on_inexact_numbers_is_within_its_bound(name: str) -> None:
    (x, a), (y, b) = with_error(1), with_error(2)
    b.run = a.run
    got = OPERATIONS[name](x, y).double()
    as_bounded = {**OPERATIONS, "where": lambda a, b: bounded.where(a > b, a, b)}[name]
    result = MEANING[as_bounded](a, b) if as_bounded in MEANING else as_bounded(a, b)
    error = (got - result.value).abs()
    assert (error <= result.error).all()
    assert (error > 0.3 * result.error).any(), "a bound that nothing comes near to says little"


@pytest.mark.parametrize("op", [ops.sqrt, ops.abs, operator.neg], ids=lambda op: op.__name__)
def test_the_error_of_a_function_is_within_its_bound(op) -> None:
    x, a = with_error(3)
    result = MEANING.get(op, op)(a)
    error = (op(x).double() - result.value).abs()
    assert (error <= result.error).all()
    assert (error > 0.3 * result.error).any()


def test_where_terms_cancel_the_bound_is_that_of_the_terms() -> None:
    run = Run(F32)
    x, y = (torch.tensor([value]) for value in (1.0, 1.0 + 2**-20))
    a, b = (run.exact(value) * 0.1 for value in (x, y))
    got = (x * 0.1 - y * 0.1).double()
    assert (got - (a - b).value).abs() <= (a - b).error
    assert (a - b).error > 1e-3 * (a - b).value.abs()


def test_a_comparison_that_rounding_may_turn_around_allows_both_sides() -> None:
    run = Run(F32)
    a = run.exact(torch.tensor([1.0, 1.0, 1.0], dtype=F64))
    b = Bounded(run, torch.tensor([1.0, 1.0 + 1e-8, 2.0], dtype=F64), torch.tensor([0.0, 1e-7, 1e-7], dtype=F64))
    chosen = bounded.where(a < b, 3.0, 5.0)
    assert chosen.value.tolist() == [5.0, 3.0, 3.0]
    assert chosen.error.tolist() == [0.0, 2.0, 0.0], "only the second is uncertain"
    for joined, uncertain in (((a < b) & (a < 2.0), [False, True, False]), ((a < b) | (a < 2.0), [False] * 3)):
        assert joined.uncertain.tolist() == uncertain


def test_zero_is_exact_and_a_division_by_it_has_no_bound() -> None:
    run = Run(F32)
    zero = run.exact(torch.zeros(3)) * 0.1
    assert zero.error.tolist() == [0.0] * 3
    assert not (zero > 0).uncertain.any()
    nearly = Bounded(run, torch.tensor([1e-9], dtype=F64), torch.tensor([1e-8], dtype=F64))
    assert (1.0 / nearly).error.isinf().all()


@pytest.mark.parametrize(
    ("op", "shape"),
    [(op, shape) for op in (ops.row_sum, ops.tensor_sum) for shape in ((3, 9000), (70000,), (5, 7))]
    + [(op, shape) for op in (ops.sum_last, ops.sum_second_last) for shape in ((3, 9000), (300, 40), (2, 70, 5))],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_sums_in_any_order_are_within_their_bounds(op, shape) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = MEANING[op](Run(F32).exact(x))
    assert result.value.shape == op(x).shape
    assert ((op(x).double() - result.value).abs() <= result.error).all()
    assert (result.error <= 1e-5 * op(x.abs())).all()


def test_a_result_that_is_stored_is_replaced_and_what_it_was_is_kept() -> None:
    run = Run(F32, {1: torch.tensor([2.0])})
    a = run.exact(torch.tensor([1.0]))
    first = a + 0.5
    second = first + 0.25
    assert (first.place, second.place, second.value.item(), second.error.item()) == (0, 1, 2.0, 0.0)
    assert run.computed[1].value.item() == 1.75
    assert (second + 1.0).value.item() == 3.0
