"""Triton's Newton-Schulz iterations: against the polynomials in float64, and the same bits in any stack.

Without a GPU they are interpreted, for small matrices; tests/gpu/test_muon.py has larger ones.
"""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton")

from fusedadam import compat
from fusedadam.backends.triton import launching, ops, orthogonal
from fusedadam.rules.newton_schulz import DEFAULT, NewtonSchulz, coefficients_of
from fusedadam.rules.orthogonal import orthogonalize as by_torch
from fusedadam.tensors.matrices import Matrices
from tests.support import F32, F64

DEVICE = "cpu" if ops.INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not orthogonal.multiplies(F32, torch.device(DEVICE)), reason="torch's products are used here"
)
# Where even the direction of the result is rounding noise, its size is by chance.
AS_GOOD, NOISE, AS_GOOD_AS_NOISE = 1.07, 0.5, 1.25


class Table:
    """What a table says of its products."""

    def __init__(self, method):
        self.newton_schulz = method


def queue(stack, method, at_once=None):
    needed = orthogonal.scratch(Matrices(*stack.shape), stack.dtype, stack.device)
    memory = torch.full([(at_once or len(stack)) * needed], 0xFF, dtype=torch.uint8, device=stack.device)  # NaN
    return orthogonal.prepare_orthogonalize(Table(method), stack, memory)


def result(stack, method=DEFAULT, at_once=None):
    found = stack.clone()
    queue(found, method, at_once)(None)
    return found


def exact(stack, method):
    found = stack.to(F64)
    by_torch(found, method)
    return found


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def distances(found, expected):
    return (found - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))


def spectra(n):
    k = torch.arange(n)
    ranks = [(k < rank).to(F64) for rank in (1, 2, 16)]
    one_large = [torch.where(k == 0, 1.0, rest) for rest in (0.3, 0.1, 0.03, 0.01, 0.001)]
    decades = [torch.logspace(0, -d, n, dtype=F64) for d in (2, 4, 6)]
    return [*ranks, *one_large, *decades, torch.ones(n)]


@functools.cache
def hard_stack(rows, columns):
    """Matrices with these singular values, and a random one."""
    u, v = (torch.linalg.qr(drawn(n, rows).to(F64))[0] for n in (rows, columns))
    made = [(u * s.to(DEVICE)) @ v.T for s in spectra(rows)]
    return torch.stack([*made, drawn(rows, columns, seed=1).to(F64)]).to(F32)


def in_bfloat16(stack, method):
    """torch's own way."""
    x = (stack / stack.norm(dim=(1, 2), keepdim=True)).bfloat16()
    for a, b, c in method.coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(F64)


def assert_as_good_as_bfloat16(stack, method):
    ideal, found = exact(stack, method), result(stack, method)
    assert found.isfinite().all()
    ours, theirs = distances(found, ideal), distances(in_bfloat16(stack, method), ideal)
    factor = torch.where(theirs < NOISE, AS_GOOD, AS_GOOD_AS_NOISE)
    assert (ours <= factor * theirs + 1e-3).all(), (ours / theirs).tolist()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (40, 12), (1, 9), (70, 130), (130, 70)], ids=str)
def test_it_is_the_polynomial(shape, steps):
    method, stack = NewtonSchulz(coefficients_of("you", steps)), drawn(2, *shape)
    assert (distances(result(stack, method), exact(stack, method)) < (0.02 if steps else 1e-6)).all()


@pytest.mark.parametrize("triple", [(1.5, -0.5, 0.0), (1.2, 0.0, -0.3), (0.0, 2.0, -1.0)], ids=str)
def test_coefficients_may_be_zero(triple):
    method, stack = NewtonSchulz(coefficients_of(triple, 3)), drawn(1, 40, 12)
    assert (distances(result(stack, method), exact(stack, method)) < 0.02).all()


@pytest.mark.parametrize("shape", [(130, 200), (261, 140)], ids=str)
def test_large_tiles(shape, monkeypatch):
    monkeypatch.setattr(orthogonal, "tiles_for", lambda rows: orthogonal.LARGE)
    method, stack = NewtonSchulz(coefficients_of("keller", 2)), drawn(1, *shape)
    assert (distances(result(stack, method), exact(stack, method)) < 0.005).all()


@pytest.mark.parametrize("shape", [(3, 5), (64, 72), (70, 65)], ids=str)
def test_a_matrix_has_the_same_bits_in_any_stack(shape):
    method, stack = NewtonSchulz(coefficients_of("keller", 3)), drawn(5, *shape)
    stack[2] = 0.0
    stack[3] *= 1e25
    stack[4, 0, 0] = torch.nan
    every = result(stack, method)
    for at_once in (1, 2):
        torch.testing.assert_close(result(stack, method, at_once), every, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result(stack[3:4], method), every[3:4])
    assert every[[0, 1, 3]].isfinite().all()
    assert not every[2].any()
    assert every[4].isnan().all()
    assert (distances(every[3:4], exact(stack[3:4], method)) < 0.02).all()


@pytest.mark.parametrize(("name", "steps"), [("keller", 5), ("polar-express", 8)])
def test_it_is_as_good_as_bfloat16_for_every_spectrum(name, steps):
    assert_as_good_as_bfloat16(hard_stack(32, 48), NewtonSchulz(coefficients_of(name, steps)))


def test_errors_of_a_mirror_do_not_grow_where_few_steps_follow():
    """One singular value: the first step shrinks it to a ninth, and two steps were as far off as bfloat16's."""
    stack, method = hard_stack(130, 140)[:1], NewtonSchulz(coefficients_of("you", 2))
    assert distances(result(stack, method), exact(stack, method)) < 0.02


def test_scratch_memory_is_what_it_says():
    for shape in ((3, 5), (130, 70), (70, 132)):
        needed = orthogonal.scratch(Matrices(1, *shape), F32, torch.device(DEVICE))
        memory = torch.zeros(3 * needed + 4096, dtype=torch.uint8, device=DEVICE)
        memory[3 * needed :] = 7
        orthogonal.prepare_orthogonalize(Table(DEFAULT), drawn(3, *shape), memory[: 3 * needed])(None)
        assert (memory[3 * needed :] == 7).all()


def test_float64_and_what_has_no_descriptors_take_torchs_products(monkeypatch):
    stack, method = drawn(2, 20, 30).to(F64), NewtonSchulz()
    expected = exact(stack, method)
    memory = torch.empty(0, dtype=torch.uint8)
    for found in (stack, stack.to(F32)):
        assert not isinstance(orthogonal.prepare_orthogonalize(Plain(method), found, memory), launching.Queue)
        orthogonal.prepare_orthogonalize(Plain(method), found, memory)(None)
        assert (distances(found, expected) < 0.05).all()
        monkeypatch.setattr(compat, "tensor_descriptor", lambda: None)


class Plain(Table):
    found_inf, home = None, torch.device(DEVICE)
