"""The formula of Lamb, against the paper's written out by hand."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.meaning.against_torch import SHAPES, parameters, params_of, train
from tests.meaning.by_hand import LambByHand, norm_by_hand
from tests.support import F64, QUICK_PLACES

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
FLAGS = [
    {},
    {"bias_correction": False, "maximize": True},
    {"max_weight_norm": 1.5},
    {"adam": True},
    {"use_global_grad_norm": True},
    {"use_global_grad_norm": True, "adam": True, "bias_correction": False},
    {"max_weight_norm": 10, "use_global_grad_norm": True, "bias_correction": False, "maximize": True},
]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_the_formula_by_hand(flags, place):
    device, backend = place
    optimizer = fusedadam.Lamb(parameters(device=device), **OPTIONS, **flags, backend=backend)
    by_hand = {p: LambByHand(p.detach().cpu().clone(), **OPTIONS, **flags) for p in params_of(optimizer)}
    for step in range(15):
        train(optimizer, 1, start=step)
        norm = norm_by_hand([p.grad for p in by_hand if p.grad is not None])
        ratios = optimizer.trust_ratios()
        for p, expected in by_hand.items():
            if p.grad is None:
                assert ratios[p] == 1.0
                continue
            expected.step(p.grad.cpu(), norm)
            assert ratios[p] == pytest.approx(expected.ratio, rel=1e-9)
    for p, expected in by_hand.items():
        found = {"p": p, "m": optimizer.state[p]["exp_avg"], "v": optimizer.state[p]["exp_avg_sq"]}
        for name, value in found.items():
            torch.testing.assert_close(value.detach().cpu(), getattr(expected, name), rtol=1e-10, atol=1e-12)


def test_adam_makes_it_adamw():
    a, b = parameters(), parameters()
    train(fusedadam.Lamb(a, **OPTIONS, eps=1e-8, adam=True))
    train(torch.optim.AdamW(b, **OPTIONS, eps=1e-8))
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)


def test_the_ratio_is_1_where_a_norm_is_0():
    zeros, still = torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.ones(5))
    empty = torch.nn.Parameter(torch.zeros(0))
    optimizer = fusedadam.Lamb([zeros, still, empty], lr=0.1, weight_decay=0.0)
    assert optimizer.trust_ratios() == {zeros: 1.0, still: 1.0, empty: 1.0}  # before the first step
    zeros.grad, still.grad, empty.grad = torch.ones(5), torch.zeros(5), torch.zeros(0)
    optimizer.step()
    assert optimizer.trust_ratios() == {zeros: 1.0, still: 1.0, empty: 1.0}
    torch.testing.assert_close(zeros.detach(), torch.full((5,), -0.1), rtol=1e-5, atol=0)
    assert torch.equal(still.detach(), torch.ones(5))


@pytest.mark.parametrize("norm", [0.25, 1.0, 1.0000001, 4.0, 1e6])
def test_the_global_norm_divides_above_1_without_a_small_number_added(norm):
    grad = torch.zeros(len(SHAPES), 4, dtype=F64)
    grad[0, 0] = norm
    param = torch.nn.Parameter(torch.ones_like(grad))
    param.grad = grad
    optimizer = fusedadam.Lamb([param], betas=(0.0, 0.0), use_global_grad_norm=True)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"][0, 0].item() == min(norm, 1.0)
    assert optimizer.grad_norm.item() == pytest.approx(norm)


def test_both_ways_to_clip_exclude_each_other():
    params = [torch.nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="exclude each other"):
        fusedadam.Lamb(params, use_global_grad_norm=True, max_grad_norm=1.0)
    optimizer = fusedadam.Lamb(params, use_global_grad_norm=True)
    optimizer.param_groups[0]["max_grad_norm"] = 0.5
    params[0].grad = torch.ones(3)
    with pytest.raises(ValueError, match="exclude each other"):
        optimizer.step()


def test_groups_that_use_the_global_norm_in_two_ways_share_it():
    """Each kind had a norm of its own, and only one of them was reported."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": params[:1], "max_grad_norm": 1.0}, {"params": params[1:], "use_global_grad_norm": True}]
    optimizer = fusedadam.Lamb(groups, lr=0.1)
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(5)
    assert [*optimizer.report("grad_norm").values()] == [pytest.approx(5)] * 2
    moments = [optimizer.state[param]["exp_avg"].norm().item() for param in params]
    assert moments == [pytest.approx(0.1 * 3 / 5, rel=1e-5), pytest.approx(0.1 * 4 / 5, rel=1e-5)]
