"""AdamW and Lion with ``cautious`` and ``update_clipping``, against the papers' formulas written out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import fusedadam
from tests.meaning.against_torch import params_of, trained_beside
from tests.meaning.by_hand import AdamByHand, LionByHand
from tests.support import QUICK_PLACES

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


def masked(update: Tensor, grad: Tensor) -> Tensor:
    """Algorithm 1 of Cautious Optimizers: a mask with the mean 1, which the authors' code bounds by 1e-3."""
    mask = (update * grad > 0).to(update.dtype)
    return update * mask / mask.mean().clamp(min=1e-3)


class CautiousLionByHand(LionByHand):
    def step(self, g: Tensor) -> None:
        g = -g if self.maximize else g
        u = masked(torch.sign(self.b1 * self.m + (1 - self.b1) * g), g)
        self.p = self.p - self.lr * (u + self.wd * self.p)
        self.m = self.b2 * self.m + (1 - self.b2) * g


class RestrainedAdamByHand(AdamByHand):
    def __init__(self, param, cautious=False, update_clipping=False, **options):
        super().__init__(param, **options)
        self.cautious, self.clips = cautious, update_clipping

    def step(self, g: Tensor) -> None:
        """Algorithm 2 of arXiv 2304.13013 (StableAdamW), whose learning rate also scales the decay."""
        before, now = self.p, -g if self.maximize else g
        super().step(g)
        m_hat = self.m / (1 - self.b1**self.t)
        second = self.x / (1 - self.b2**self.t)
        u = m_hat / (second.sqrt() + self.eps)
        u = masked(u, now) if self.cautious else u
        rms = (now**2 / second.clamp(min=self.eps**2)).mean().sqrt()
        lr = self.lr / max(1.0, rms.item()) if self.clips else self.lr
        self.p = before - lr * (self.wd * before + u)


CHOICES = [{"cautious": a, "update_clipping": b} for a, b in itertools.product((False, True), repeat=2)]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("more", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_adamw_equals_the_formula_by_hand(chosen, more, place):
    options = {**OPTIONS, **chosen, **more}
    optimizer, by_hand = trained_beside(fusedadam.AdamW, RestrainedAdamByHand, place, options)
    for p, expected in by_hand.items():
        torch.testing.assert_close(p.detach().cpu(), expected.p, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].cpu(), expected.m, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("maximize", [False, True])
def test_lion_equals_the_formula_by_hand(maximize, place):
    def by_hand(param, cautious, **options):
        return CautiousLionByHand(param, **options)

    options = {**OPTIONS, "maximize": maximize, "cautious": True}
    _, expected = trained_beside(fusedadam.Lion, by_hand, place, options)
    for p, formula in expected.items():
        torch.testing.assert_close(p.detach().cpu(), formula.p, rtol=1e-11, atol=1e-13)


def test_where_nothing_agrees_nothing_moves_and_nothing_becomes_nan():
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = fusedadam.AdamW([param], lr=0.1, weight_decay=0.0, cautious=True, betas=(0.99, 0.999))
    for sign in (1.0, 1.0, 1.0, -1.0):
        param.grad = torch.full((8,), sign)
        before = param.detach().clone()
        optimizer.step()
    assert torch.equal(param, before), "the momentum still points the other way"
    assert not params_of(optimizer)[0].isnan().any()


def test_options_of_groups_and_of_old_state_dicts():
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = fusedadam.AdamW([{"params": params[:1], "cautious": True}, {"params": params[1:]}])
    assert [group["cautious"] for group in optimizer.param_groups] == [True, False]
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["cautious"], group["update_clipping"]
    optimizer.load_state_dict(saved)
    params[0].grad = torch.ones(4)
    optimizer.step()
    with pytest.raises((TypeError, ValueError), match="cautious"):
        fusedadam.AdamW(params, cautious="yes")


@pytest.mark.parametrize("backend", ["numba", "eager"])
@pytest.mark.parametrize("eps", [1e-8, 1e-25, 0.0])
@pytest.mark.parametrize("chosen", CHOICES, ids=str)
def test_gradients_of_zero_make_no_more_nans_than_in_plain_adamw(chosen, eps, backend):
    """The square of 1e-25 is 0 in float32."""

    def after(grad, **more):
        param = torch.nn.Parameter(torch.ones(4))
        optimizer = fusedadam.AdamW([param], lr=0.1, eps=eps, backend=backend, **more)
        for _ in range(2):
            param.grad = torch.tensor(grad)
            optimizer.step()
        return param.detach()

    for grad in ([0.0] * 4, [0.0, 1.0, 0.0, -1.0]):
        assert not (after(grad, **chosen).isnan() & ~after(grad).isnan()).any()
