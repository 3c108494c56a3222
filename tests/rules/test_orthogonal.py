"""Orthogonalization by torch's products: against the singular value decomposition, and the same bits in any stack."""

from __future__ import annotations

import pytest
import torch

from fusedadam.rules import orthogonal
from fusedadam.rules.newton_schulz import DEFAULT, NAMED, NewtonSchulz, coefficients_of
from fusedadam.rules.orthogonal import orthogonalize, times_transpose
from tests.support import F32, F64

LARGE = orthogonal.SMALLEST_BLOCK + 44  # taken one by one, in blocks of rows


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Of small products, too."""
    monkeypatch.setattr(orthogonal, "WHOLE_UP_TO", {})


def drawn(*shape, dtype=F64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def by_singular_values(matrix, method):
    """The polynomials, of the singular values alone."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for a, b, c in method.coefficients:
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@pytest.mark.parametrize("steps", [0, 1, 5, 9])
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(5, 7), (40, 12), (1, 9), (LARGE, LARGE + 30), (LARGE + 600, LARGE)], ids=str)
def test_it_is_the_polynomial_of_the_singular_values(shape, name, steps):
    method = NewtonSchulz(coefficients_of(name, steps))
    stack = drawn(2, *shape)
    expected = torch.stack([by_singular_values(matrix, method) for matrix in stack])
    orthogonalize(stack, method)
    torch.testing.assert_close(stack, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("triple", [(1.5, -0.5, 0.0), (1.2, 0.0, -0.3), (0.0, 2.0, -1.0), (0.0, 0.0, 2.0)], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (LARGE + 30, LARGE)], ids=str)
def test_coefficients_may_be_zero(shape, triple):
    method = NewtonSchulz(coefficients_of(triple, 3))
    stack = drawn(2, *shape)
    expected = torch.stack([by_singular_values(matrix, method) for matrix in stack])
    orthogonalize(stack, method)
    torch.testing.assert_close(stack, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("steps", "low", "high"), [(5, 0.68, 1.15), (6, 0.99, 1.01)])
def test_singular_values_end_where_the_page_says(steps, low, high):
    stack = drawn(1, 30, 90)
    orthogonalize(stack, NewtonSchulz(coefficients_of("keller" if steps == 5 else "polar-express", steps)))
    values = torch.linalg.svdvals(stack[0])
    assert low < float(values.min()) <= float(values.max()) < high


@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (64, 200), (LARGE, LARGE), (LARGE + 70, LARGE)], ids=str)
def test_a_matrix_has_the_same_bits_in_a_stack_of_any_height(shape):
    stack = drawn(7, *shape, dtype=F32)
    stack[2] = 0.0
    stack[3] *= 1e25
    stack[4, 0, 0] = torch.nan
    alone = [matrix[None].clone() for matrix in stack]
    several, every = stack[:4].clone(), stack.clone()
    for one in (*alone, several, every):
        orthogonalize(one, DEFAULT)
    torch.testing.assert_close(torch.cat(alone), every, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(several, every[:4], rtol=0, atol=0)
    assert every[[0, 1, 3, 5, 6]].isfinite().all()
    assert not every[2].any()
    assert every[4].isnan().all()


@pytest.mark.parametrize("scale", [1e-18, 1e25])
def test_large_and_small_updates_have_the_direction_of_others(scale):
    plain, scaled = drawn(1, 20, 30, dtype=F32), drawn(1, 20, 30, dtype=F32) * scale
    for stack in (plain, scaled):
        orthogonalize(stack, DEFAULT._replace(eps=1e-30))
    torch.testing.assert_close(scaled, plain, rtol=0, atol=2e-2)  # products may be in bfloat16


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1023, 1100])
def test_symmetric_products_are_symmetric(rows):
    x, added = drawn(rows, 40), drawn(rows, rows, seed=1)
    added = added + added.mT
    every = {(1.0, 0.0): times_transpose(x)}
    for alpha, beta in ((2.0, -0.5), (2.0, 0.0), (0.0, 2.0)):
        every[alpha, beta] = times_transpose(x, added, alpha=alpha, beta=beta)
    for (alpha, beta), found in every.items():
        torch.testing.assert_close(found, alpha * x @ x.mT + beta * added, rtol=1e-12, atol=1e-12)
        height = max(orthogonal.SMALLEST_BLOCK, -(-rows // orthogonal.BLOCKS))
        assert torch.equal(found[height:, :height], found[:height, height:].mT)
