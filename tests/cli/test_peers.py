"""The loops that BertAdam and Lamb are compared with compute what they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusedadam.cli.peers import BertAdamLoop, LambLoop
from tests.meaning.by_hand import BertAdamByHand, LambByHand


@pytest.mark.parametrize(
    ("make", "formula", "options"),
    [
        (BertAdamLoop, BertAdamByHand, {}),
        (BertAdamLoop, BertAdamByHand, {"warmup": 0.3, "t_total": 8}),
        (BertAdamLoop, BertAdamByHand, {"max_grad_norm": 0.0, "weight_decay": 0.0}),
        (LambLoop, LambByHand, {}),
        (LambLoop, LambByHand, {"betas": (0.5, 0.7), "weight_decay": 0.3}),
    ],
)
def test_a_loop_is_the_formula(make: Any, formula: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((30,), (5, 20))]
    loop, by_hand = make(params, lr=1e-2, **options), [formula(p, lr=1e-2, **options) for p in params]
    for _ in range(10):
        for param, hand in zip(params, by_hand, strict=True):
            param.grad = torch.randn_like(param)
            hand.step(param.grad.clone())
        loop.step()
        for param, hand in zip(params, by_hand, strict=True):
            torch.testing.assert_close(param.detach(), hand.p.detach(), rtol=0, atol=1e-12)
