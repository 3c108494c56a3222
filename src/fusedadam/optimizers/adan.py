"""Adan: Adam with Nesterov's momentum, from differences of gradients (https://arxiv.org/abs/2208.06677)."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import OursAndTorchs, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def adan_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, beta3: Scalar, eps: Scalar, weight_decay: Scalar,
    max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "decay": 1 - lr * weight_decay, "shrink": 1 / (1 + lr * weight_decay), "max_grad_norm": max_grad_norm,
        "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2, "beta3": beta3, "beta3c": 1 - beta3, "eps": eps,
        "step_size": lr / (1 - beta1**step), "step_size_diff": lr * beta2 / (1 - beta2**step),
        "debias3": 1 / sqrt(1 - beta3**step),
        "has_previous": where(step == 1, 0.0, 1.0),  # the first difference is 0
    }


@rule(scalars=adan_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def adan(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, exp_avg_diff: Value, neg_pre_grad: Value, *,
    decay: Scalar, shrink: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar, beta3: Scalar, beta3c: Scalar,
    eps: Scalar, step_size: Scalar, step_size_diff: Scalar, debias3: Scalar, has_previous: Scalar,
    max_grad_norm: Scalar, no_prox: Flag, maximize: Flag, clipped: Flag,
) -> Values:
    diff = where(has_previous > 0, grad + neg_pre_grad, 0.0)
    ahead = grad + beta2 * diff
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_diff = exp_avg_diff + beta2c * (diff - exp_avg_diff)
    exp_avg_sq = beta3 * exp_avg_sq + beta3c * ahead * ahead
    update = (step_size * exp_avg + step_size_diff * exp_avg_diff) / (sqrt(exp_avg_sq) * debias3 + eps)
    param = param * decay - update if no_prox else (param - update) * shrink
    neg_pre_grad = -grad
    return param, exp_avg, exp_avg_sq, exp_avg_diff, neg_pre_grad
# fmt: on


class Adan(FusedOptimizer):
    r"""Adan (`arXiv 2208.06677 <https://arxiv.org/abs/2208.06677>`_), with the names and defaults of the authors'
    package.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
        d_t = \beta_2 d_{t-1} + (1 - \beta_2) (g_t - g_{t-1}), \quad
        n_t = \beta_3 n_{t-1} + (1 - \beta_3) (g_t + \beta_2 (g_t - g_{t-1}))^2, \quad
        u_t = \frac{m_t / (1 - \beta_1^t) + \beta_2 d_t / (1 - \beta_2^t)}
        {\sqrt{n_t / (1 - \beta_3^t)} + \epsilon}, \quad
        p_t = \frac{p_{t-1} - \eta u_t}{1 + \eta\lambda}

    where :math:`g_0 = g_1`.

    Args:
        params, lr, eps: as for :class:`AdamW`
        betas: how much is kept of the averages of gradients, of their differences, and of squares; the paper's are one
            minus these
        weight_decay: :math:`\lambda`; its effect does not depend on the update
        no_prox: decoupled weight decay as AdamW's, :math:`p_t = (1 - \eta\lambda) p_{t-1} - \eta u_t`
        max_grad_norm, peak_lr, maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Adan(model.parameters(), lr=1e-3, weight_decay=0.02)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = adan
    states = {
        "exp_avg": State(decay="beta1"),
        "exp_avg_sq": State(signed=False, decay="beta3"),
        "exp_avg_diff": State(decay="beta2"),
        "neg_pre_grad": State(subtracted_from="grad"),
    }
    options = OPTIONS | PEAK_LR | {
        "betas": functools.partial(checks.betas, count=3), "eps": checks.number, "no_prox": checks.boolean
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR

    @takes(OursAndTorchs)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8, weight_decay: float = 0.0, max_grad_norm: float | None = None, no_prox: bool = False, *,
        peak_lr: float | None = None, maximize: bool = False, **common: Unpack[OursAndTorchs],
    ) -> None: ...  # fmt: skip
