"""The formulas of Adam and AdamW, against torch.optim and against the specification written out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedadam
from fusedadam.functional import adamw_
from tests.meaning.against_torch import assert_as_close_to_float64, assert_equals_torch
from tests.meaning.by_hand import AdamByHand
from tests.support import BF16, F32, F64, QUICK_PLACES, ulp

FLAGS = list(itertools.product((False, True), repeat=2))
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
OTHER = {"lr": 3e-3, "weight_decay": 0.3, "betas": (0.8, 0.95)}
BOTH = pytest.mark.parametrize("name", ["AdamW", "Adam"])


@BOTH
@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize(("amsgrad", "maximize"), FLAGS)
def test_equals_torch_in_float64(name, amsgrad, maximize, place):
    options = {**OPTIONS, "amsgrad": amsgrad, "maximize": maximize}
    assert_equals_torch(name, place, options, OTHER, steps=30, rtol=1e-12)


@BOTH
@pytest.mark.parametrize("place", QUICK_PLACES)
def test_is_as_close_to_float64_as_torch_is_in_float32(name, place):
    assert_as_close_to_float64(name, place, OPTIONS)


@pytest.mark.parametrize(("amsgrad", "maximize"), FLAGS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_version_by_hand_is_torchs(decoupled, amsgrad, maximize):
    options = {**OPTIONS, "amsgrad": amsgrad, "maximize": maximize}
    param = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=F64))
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)([param], **options)
    by_hand = AdamByHand(param.detach(), decoupled=decoupled, **options)
    for step in range(10):
        param.grad = torch.sin(torch.arange(50, dtype=F64) * (step + 1))
        by_hand.step(param.grad)
        theirs.step()
    torch.testing.assert_close(by_hand.p, param.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("betas", [(0.9, 0.9999), (0.0, 0.999999), (0.5, 0.0)])
def test_scalars_are_made_in_float64(betas):
    """In float32, 1 - 0.9999 alone is off by 132 ulps, and powers drift further."""
    start, grad = torch.full((100,), 1e-3), torch.linspace(-2, 2, 100)
    for step in (1, 2, 1000):
        p, m, v = start.clone(), torch.full((100,), 0.1), torch.full((100,), 0.2)
        by_hand = AdamByHand(start.double(), betas=betas, lr=1e-3, weight_decay=0.01)
        by_hand.m, by_hand.v, by_hand.t = m.double(), v.double(), step - 1
        by_hand.step(grad.double())
        adamw_(p, grad, m, v, step=step, beta1=betas[0], beta2=betas[1], weight_decay=0.01)
        size = torch.maximum(start.double().abs(), (by_hand.p - start.double()).abs())
        assert ((p.double() - by_hand.p).abs() <= 3 * ulp(size, F32)).all()


def test_the_operator_and_the_optimizer_are_the_same_to_the_bit():
    grads = [torch.randn(33, generator=torch.Generator().manual_seed(k)) for k in range(5)]
    param = torch.nn.Parameter(torch.linspace(-1, 1, 33))
    p, m, v = param.detach().clone(), torch.zeros(33), torch.zeros(33)
    optimizer = fusedadam.AdamW([param], lr=1e-2, weight_decay=0.1)
    for step, grad in enumerate(grads, 1):
        param.grad = grad
        optimizer.step()
        adamw_(p, grad, m, v, step=step, lr=1e-2, weight_decay=0.1)
    assert torch.equal(p, param.detach())
    assert torch.equal(m, optimizer.state[param]["exp_avg"])


def test_lists_of_tensors_are_the_same_as_one_after_the_other():
    def roles():
        generator = torch.Generator().manual_seed(5)
        return [
            [torch.rand(n, generator=generator).to(d) for n, d in ((5, F32), (2000, BF16), (1, F64))] for _ in range(4)
        ]

    together, apart = roles(), roles()
    adamw_(*together, step=[1, torch.tensor([7]), 30], weight_decay=0.1)
    for tensors, step in zip(zip(*apart, strict=True), (1, 7, 30), strict=True):
        adamw_(*tensors, step=step, weight_decay=0.1)
    for a, b in zip(together, apart, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
