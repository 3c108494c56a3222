"""Trains one of ours and its counterpart in torch.optim alike, and compares parameters and states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import fusedadam
from tests.support import F32, F64

SHAPES = [(7, 5), (300,), (), (3, 4, 2, 2)]


def parameters(dtype: torch.dtype = F64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=F64).to(dtype).to(device)) for s in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: int = 20, start: int = 0) -> torch.optim.Optimizer:
    """Gradients that change in size, and that some parameters lack now and then."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for k, p in enumerate(params_of(optimizer)):
            grad = torch.randn(p.shape, generator=generator, dtype=F64).to(p) * 10 ** (-step % 3)
            p.grad = None if step % 5 == k else grad
        optimizer.step()
    return optimizer


def trained_beside(
    ours: Any, by_hand: Any, place: tuple[str, str], options: dict[str, Any]
) -> tuple[torch.optim.Optimizer, dict[Tensor, Any]]:
    """Ours in float64 after 15 steps, and for each parameter the formula by hand after as many."""
    device, backend = place
    optimizer = ours(parameters(device=device), **options, backend=backend)
    expected = {p: by_hand(p.detach().cpu().clone(), **options) for p in params_of(optimizer)}
    for step in range(15):
        train(optimizer, 1, start=step)
        for p, formula in expected.items():
            if p.grad is not None:
                formula.step(p.grad.cpu())
    return optimizer, expected


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def assert_equals_torch(
    name: str, place: tuple[str, str], options: dict[str, Any], other: dict[str, Any], steps: int = 20,
    rtol: float = 1e-11,
) -> None:  # fmt: skip
    """In float64, with two groups; ``other``: the options of the second."""
    ours, theirs = both(name, place, options, other)
    train(ours, steps)
    train(theirs, steps)
    assert_equal(ours, theirs, rtol)


def both(
    name: str, place: tuple[str, str], options: dict[str, Any], other: dict[str, Any]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Ours and torch's of this name; the rest as above."""
    device, backend = place
    made = []
    for library, own in ((fusedadam, {"backend": backend}), (torch.optim, {"foreach": False})):
        params = parameters(device=device)
        made.append(getattr(library, name)([{"params": params[:2]}, {"params": params[2:], **other}], **options, **own))
    return made[0], made[1]


def assert_equal(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, rtol: float = 1e-11) -> None:
    """All that torch keeps, to what float64 rounds."""
    for p, q in zip(params_of(ours), params_of(theirs), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol / 100)
        assert ours.state[p].keys() - {"step"} == theirs.state[q].keys() - {"step"}
        for name, value in theirs.state[q].items():
            kept = ours.state[p][name]
            if name == "mu_product":  # torch's is on the host, unless the optimizer is capturable
                kept = kept.to(value.device)
            # torch counts in the default dtype
            torch.testing.assert_close(kept, value, rtol=rtol, atol=rtol / 100, check_dtype=name != "step")


def assert_as_close_to_float64(
    name: str, place: tuple[str, str], options: dict[str, Any], dtype: torch.dtype = F32
) -> None:
    """In float32, or another dtype, ours is at most as far from float64 as torch's is."""
    device, backend = place
    ours, theirs = getattr(fusedadam, name), getattr(torch.optim, name)
    exact, mine, torchs = parameters(F64), parameters(dtype, device), parameters(dtype, device)
    with torch.no_grad():
        for p, q in zip(exact, mine, strict=True):
            p.copy_(q)  # the same start, to the bit
    train(theirs(exact, foreach=False, **options))
    train(ours(mine, backend=backend, **options))
    train(theirs(torchs, foreach=False, **options))
    off = [max((p.cpu() - e).abs().max().item() for p, e in zip(ps, exact, strict=True)) for ps in (mine, torchs)]
    assert math.isfinite(off[0])
    assert off[0] <= 1.5 * off[1] + 1e-7 or math.isnan(off[1]), off  # torch's may overflow in float16
