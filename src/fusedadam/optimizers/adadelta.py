"""Adadelta: steps as large as recent steps were, relative to recent gradients (https://arxiv.org/abs/1212.5701)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Ours, Unpack, takes
from fusedadam.contract.declarations import OPTIONS, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import sqrt
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def adadelta_scalars(
    step: Scalar, lr: Scalar, rho: Scalar, eps: Scalar, weight_decay: Scalar, max_grad_norm: Scalar
) -> dict[str, Any]:
    return {
        "lr": lr, "rho": rho, "rhoc": 1 - rho, "eps": eps,
        "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
    }


@rule(scalars=adadelta_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def adadelta(
    param: Value, grad: Value, square_avg: Value, acc_delta: Value, *,
    lr: Scalar, rho: Scalar, rhoc: Scalar, eps: Scalar, weight_decay: Scalar, max_grad_norm: Scalar,
    maximize: Flag, clipped: Flag,
) -> Values:
    grad = grad + weight_decay * param
    square_avg = rho * square_avg + rhoc * grad * grad
    delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * grad
    acc_delta = rho * acc_delta + rhoc * delta * delta
    param = param - lr * delta
    return param, square_avg, acc_delta
# fmt: on


class Adadelta(FusedOptimizer):
    r"""Adadelta (`arXiv 1212.5701 <https://arxiv.org/abs/1212.5701>`_), a drop-in for :class:`torch.optim.Adadelta`.

    .. math::
        v_t = \rho v_{t-1} + (1 - \rho) g_t^2, \quad
        \Delta_t = \frac{\sqrt{u_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}} g_t, \quad
        u_t = \rho u_{t-1} + (1 - \rho) \Delta_t^2, \quad p_t = p_{t-1} - \eta \Delta_t

    Args:
        params: as for :class:`AdamW`
        lr: learning rate, which the steps :math:`\Delta` are multiplied by; a number, or a tensor of one element
        rho: decay of the two averages, in [0, 1]
        eps: added under both roots
        weight_decay: an L2 penalty, added to the gradient after clipping
        foreach, capturable, maximize, differentiable, fused: as for :class:`AdamW`
        max_grad_norm, state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Adadelta(model.parameters(), lr=1.0)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = adadelta
    takes_complex = True
    states = {"square_avg": State(signed=False, decay="rho"), "acc_delta": State(signed=False, decay="rho")}
    options = OPTIONS | {"rho": checks.fraction, "eps": checks.number}

    @takes(Ours)
    def __init__(
        self, params: Params, lr: float | Tensor = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0,
        foreach: bool | None = None, *, capturable: bool = False, maximize: bool = False, differentiable: bool = False,
        fused: bool | None = None, max_grad_norm: float | None = None, **common: Unpack[Ours],
    ) -> None: ...  # fmt: skip
