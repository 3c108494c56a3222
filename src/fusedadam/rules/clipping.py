"""Clipping by norm, for rules."""

from __future__ import annotations

from fusedadam.rules.ops import minimum
from fusedadam.rules.rule import Scalar, Value


def clip_factor(norm: Value, max_norm: Scalar) -> Value:
    """What gradients of this norm are multiplied by, as in torch.nn.utils.clip_grad_norm_; a helper for rules."""
    return minimum(1.0, max_norm / (norm + 1e-6))
