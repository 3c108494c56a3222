"""Norms and clipping by norm: helpers for rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedadam.rules.ops import group_sum, minimum, sqrt, tensor_sum, total

if TYPE_CHECKING:
    from fusedadam.rules.rule import Flag, Scalar, Value, Values

__all__ = ["clip_factor", "clipped_by_norm", "group_norm", "maximized_and_clipped", "tensor_norm", "total_norm"]


def clip_factor(norm: Value, max_norm: Scalar) -> Value:
    """What gradients of this norm are multiplied by, as in torch.nn.utils.clip_grad_norm_."""
    return minimum(1.0, max_norm / (norm + 1e-6))


def tensor_norm(x: Value) -> Value:
    """The Euclidean norm over the whole parameter."""
    return sqrt(tensor_sum(x * x))


def group_norm(x: Value) -> Value:
    """The Euclidean norm over the parameters of the group whose gradients have the same dtype."""
    return sqrt(group_sum(x * x))


def total_norm(x: Value) -> Value:
    """The Euclidean norm over all parameters."""
    return sqrt(total(x * x))


def clipped_by_norm(grad: Value, max_norm: Scalar) -> Values:
    """The clipped gradient, and the norm of all gradients before clipping."""
    norm = total_norm(grad)
    return grad * clip_factor(norm, max_norm), norm


def maximized_and_clipped(grad: Value, max_grad_norm: Scalar, maximize: Flag, clipped: Flag) -> Value:
    """An opening of rules, ``@rule(..., opening=maximized_and_clipped)``: the gradient to descend, clipped to
    ``max_grad_norm``. ``grad_norm``, the norm before, may be reported."""
    if maximize:
        grad = -grad
    if clipped:
        grad, grad_norm = clipped_by_norm(grad, max_grad_norm)
    return grad
