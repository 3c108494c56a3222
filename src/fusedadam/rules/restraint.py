"""Steps that hold back where they may do harm: helpers for rules."""

from __future__ import annotations

from fusedadam.rules.ops import maximum, sqrt, tensor_sum, where
from fusedadam.rules.rule import Scalar, Value

LEAST_AGREEMENT = 1e-3  # of all elements: the rest is enlarged a thousand times at most


def agreement(update: Value, grad: Value, numel: Scalar) -> Value:
    """0 where an update goes against the gradient; what is left is enlarged so that a tensor's mean is 1
    (https://arxiv.org/abs/2411.16085)."""
    agrees = where(update * grad > 0, 1.0, 0.0)
    return agrees * (numel / maximum(tensor_sum(agrees), LEAST_AGREEMENT * numel))


def surprise(grad: Value, second_moment: Value, eps: Scalar, numel: Scalar) -> Value:
    """How much larger a tensor's gradients are than their second moments say, as a root mean square; 1 if they are
    smaller (https://arxiv.org/abs/2304.13013)."""
    square = grad * grad
    # guards 0 / 0 where eps * eps underflows
    surprises = where(square > 0, square / maximum(second_moment, eps * eps), 0.0)
    return maximum(sqrt(tensor_sum(surprises) / numel), 1.0)
