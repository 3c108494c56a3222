"""The loops compute what their optimizers should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # its scripts import each other by name

from adamp_loop import AdamPLoop

from fusedadam.cli.peers import BertAdamLoop
from tests.meaning.by_hand import AdamPByHand, BertAdamByHand


def gradients(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """Along the weight as chance has it, or perpendicular to each row of it, or to all of it but not to each row."""
    grad = torch.randn_like(weight)
    if kind != "any" and weight.ndim > 1:
        rows, raw = (t.reshape(t.shape[0] if kind == "channel" else 1, -1) for t in (weight, grad))
        raw = raw - rows * (rows * raw).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
        grad = raw.reshape(weight.shape)
    return grad


@pytest.mark.parametrize("kind", ["any", "channel", "layer"])
@pytest.mark.parametrize("shape", [(40,), (6, 50), (8, 4, 3, 3)], ids=str)
@pytest.mark.parametrize("judge", ["by hand", "adamp"])
def test_the_loop_that_adamp_is_compared_with_is_adamp(judge: str, shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3, "wd_ratio": 0.2}
    param = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    other = torch.nn.Parameter(param.detach().clone())
    loop = AdamPLoop([param], **options)
    by_hand = AdamPByHand(param.detach(), **options)
    package = pytest.importorskip("adamp").AdamP([other], **options) if judge == "adamp" else None
    for _ in range(5):
        param.grad = gradients(kind, param.detach())
        other.grad = param.grad.clone()
        loop.step()
        by_hand.step(other.grad)
        if package is not None:
            package.step()
        torch.testing.assert_close(param.detach(), by_hand.p if package is None else other.detach(), rtol=0, atol=1e-12)
        assert by_hand.projection == ("none" if param.ndim == 1 else kind) or kind == "any"


@pytest.mark.parametrize("options", [{}, {"warmup": 0.3, "t_total": 8}, {"max_grad_norm": 0.0, "weight_decay": 0.0}])
def test_the_loop_that_bert_adam_is_compared_with_is_bert_adam(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((30,), (5, 20))]
    loop, by_hand = BertAdamLoop(params, lr=1e-2, **options), [BertAdamByHand(p, lr=1e-2, **options) for p in params]
    for _ in range(10):
        for param, hand in zip(params, by_hand, strict=True):
            param.grad = torch.randn_like(param)
            hand.step(param.grad.clone())
        loop.step()
        for param, hand in zip(params, by_hand, strict=True):
            torch.testing.assert_close(param.detach(), hand.p.detach(), rtol=0, atol=1e-12)
