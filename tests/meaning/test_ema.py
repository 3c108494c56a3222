"""EmaAdamW and its operator, against the specification written out by hand in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedadam
from fusedadam.functional import ema_adam_
from tests.meaning.by_hand import EmaAdamByHand
from tests.support import BF16, F16, F32, F64, QUICK_PLACES, ulp

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "ema_decay": 0.95}


def gradients(steps, n, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator, dtype=F64).to(dtype) for _ in range(steps)]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize(("decoupled", "bias_correction", "warmup"), list(itertools.product((True, False), repeat=3)))
def test_the_optimizer_equals_the_formula_in_float64(place, decoupled, bias_correction, warmup):
    device, backend = place
    param = torch.nn.Parameter(torch.linspace(-1, 1, 77, dtype=F64, device=device))
    by_hand = EmaAdamByHand(
        param.detach().cpu(), mode=int(decoupled), bias_correction=bias_correction, warmup=warmup, **OPTIONS
    )
    optimizer = fusedadam.EmaAdamW(
        [param], decoupled=decoupled, bias_correction=bias_correction, ema_warmup=warmup, backend=backend, **OPTIONS
    )
    for grad in gradients(25, 77):
        param.grad = grad.to(device)
        optimizer.step()
        by_hand.step(grad)
    state = optimizer.state[param]
    pairs = [
        (param, by_hand.p),
        (state["ema_params"], by_hand.s),
        (state["exp_avg"], by_hand.m),
        (state["exp_avg_sq"], by_hand.v),
    ]
    for mine, expected in pairs:
        torch.testing.assert_close(mine.detach().cpu(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize(("mode", "bias_correction"), list(itertools.product((0, 1), (True, False))))
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_the_operator_equals_the_formula(place, mode, bias_correction, dtype):
    device, backend = place
    generator = torch.Generator().manual_seed(2)
    roles = [(torch.rand(400, generator=generator) + 0.1).to(dtype) for _ in range(5)]
    for step in range(1, 6):
        by_hand = EmaAdamByHand(roles[0].double(), mode=mode, bias_correction=bias_correction, **OPTIONS)
        by_hand.m, by_hand.v, by_hand.s = (t.double() for t in roles[2:])
        by_hand.t = step - 1
        by_hand.step(roles[1].double())
        mine = [t.to(device, copy=True) for t in roles]
        beta1, beta2 = OPTIONS["betas"]
        ema_adam_(
            *mine, step=step, lr=1e-2, ema_decay=0.95, beta1=beta1, beta2=beta2, mode=mode, weight_decay=0.1,
            bias_correction=bias_correction, backend=backend,
        )  # fmt: skip
        for name, result, expected in zip(
            "pgmvs", mine, (by_hand.p, roles[1], by_hand.m, by_hand.v, by_hand.s), strict=True
        ):
            error = (result.cpu().double() - expected.double()).abs()
            assert (error <= 2 * ulp(torch.maximum(expected.abs().double(), roles[0].double()), dtype)).all(), (
                name,
                step,
            )
        roles = [t.cpu() for t in mine]
        roles[1] = (torch.rand(400, generator=generator) - 0.5).to(dtype)


def test_a_float32_average_of_bfloat16_parameters_does_not_stand_still():
    """In bfloat16 an average with decay 0.9999 never moves: each change is smaller than half an ulp."""
    still, moving = (torch.nn.Parameter(torch.ones(8, dtype=BF16)) for _ in range(2))
    options = {"lr": 1e-2, "ema_decay": 0.9999, "ema_warmup": False, "weight_decay": 0.0}
    optimizers = [fusedadam.EmaAdamW([still], **options), fusedadam.EmaAdamW([moving], ema_dtype=F32, **options)]
    for _ in range(50):
        still.grad, moving.grad = torch.ones(8, dtype=BF16), torch.ones(8, dtype=BF16)
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].state[still]["ema_params"].eq(1).all()
    average = optimizers[1].state[moving]["ema_params"]
    assert average.dtype == F32
    assert average.lt(1).all()
