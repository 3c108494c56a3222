"""Compares one step of an optimizer with the same step by hand, both from the stored values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.support import assert_rounded, compute_of


def judge(
    by_hand: Any,
    param: Tensor,
    state: dict[str, Tensor],
    grad: Tensor,
    label: Any = "",
    slack: float = 4,
    **norm: float,
) -> None:
    """After ours has stepped: each result is the formula's, rounded once. The next step starts from what is stored."""
    before = by_hand.p
    if hasattr(by_hand, "as_stored"):
        by_hand.as_stored = tuple(state[name].cpu().double() for name in ("exp_avg", "exp_avg_sq"))
    by_hand.step(grad.cpu().double(), **norm)
    assert float(state["step"]) == by_hand.t, label
    stored = {"p": param.detach().cpu(), "m": state["exp_avg"].cpu(), "v": state["exp_avg_sq"].cpu()}
    sizes = {
        "p": before.abs() + 10 * by_hand.lr,  # no update of Adam's is larger
        "m": by_hand.m.abs() + grad.cpu().double().abs(),
        "v": by_hand.v,
    }
    for name, result in stored.items():
        expected, size = getattr(by_hand, name), slack * sizes[name]
        assert_rounded(result, expected, size, compute_of({"param": param}), f"{label} {name}")
        setattr(by_hand, name, result.double().clone())
