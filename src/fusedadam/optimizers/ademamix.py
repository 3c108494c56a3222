"""AdEMAMix: AdamW with a second, much slower average of gradients (https://arxiv.org/abs/2409.03137)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.decay import PEAK_LR, RELATIVE_TO_LR
from fusedadam.contract.declarations import DERIVED, OPTIONS, Backend, State
from fusedadam.contract.storage import Storage
from fusedadam.rules.clipping import clipped_by_norm
from fusedadam.rules.ops import divide, minimum, sqrt
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def ademamix_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, beta3: Scalar, alpha: Scalar, alpha_warmup: Scalar,
    eps: Scalar, weight_decay: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "decay": 1 - lr * weight_decay, "max_grad_norm": max_grad_norm, "lr": lr, "eps": eps,
        "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2, "beta3c": 1 - beta3,
        "alpha": alpha * minimum(divide(step, alpha_warmup), 1.0),
        "debias1": 1 / (1 - beta1**step), "debias2": 1 / sqrt(1 - beta2**step),
    }


@rule(scalars=ademamix_scalars, reports=("grad_norm",))
def ademamix(
    param: Value, grad: Value, exp_avg_fast: Value, exp_avg_slow: Value, exp_avg_sq: Value, *,
    decay: Scalar, lr: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar, beta3c: Scalar, alpha: Scalar,
    debias1: Scalar, debias2: Scalar, eps: Scalar, max_grad_norm: Scalar, maximize: Flag, clipped: Flag,
) -> Values:
    if maximize:
        grad = -grad
    if clipped:
        grad, grad_norm = clipped_by_norm(grad, max_grad_norm)
    exp_avg_fast = exp_avg_fast + beta1c * (grad - exp_avg_fast)
    exp_avg_slow = exp_avg_slow + beta3c * (grad - exp_avg_slow)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    update = (exp_avg_fast * debias1 + alpha * exp_avg_slow) / (sqrt(exp_avg_sq) * debias2 + eps)
    param = param * decay - lr * update
    return param, exp_avg_fast, exp_avg_slow, exp_avg_sq
# fmt: on


class AdEMAMix(FusedOptimizer):
    r"""AdEMAMix (`arXiv 2409.03137 <https://arxiv.org/abs/2409.03137>`_): AdamW with two averages of gradients, one of
    which remembers tens of thousands of steps.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad s_t = \beta_3 s_{t-1} + (1 - \beta_3) g_t, \quad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
        p_t = (1 - \eta\lambda) p_{t-1}
        - \eta \frac{m_t / (1 - \beta_1^t) + \alpha_t s_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}, \quad
        \alpha_t = \alpha \min(t / T_\alpha, 1)

    The paper also raises :math:`\beta_3` slowly, by a schedule with logarithms, which no two devices round alike. There
    is none here: change ``betas`` in the groups between steps, if you need it.

    Args:
        params, lr, eps, weight_decay: as for :class:`AdamW`
        betas: decay of the fast average, of the squares, and of the slow average
        alpha: how much of the slow average is added
        alpha_warmup: :math:`T_\alpha`, the number of steps in which ``alpha`` grows from 0; None means no warmup
        max_grad_norm, peak_lr, maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdEMAMix(model.parameters(), lr=1e-3, alpha_warmup=1000)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = ademamix
    states = {
        "exp_avg_fast": State(decay="beta1"),
        "exp_avg_slow": State(decay="beta3"),
        "exp_avg_sq": State(signed=False, decay="beta2"),
    }
    options = OPTIONS | PEAK_LR | {
        "betas": functools.partial(checks.betas, count=3), "eps": checks.number, "alpha": checks.number,
        "alpha_warmup": checks.warmup_steps,
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR | {"alpha_warmup": lambda group: group["alpha_warmup"] or 1}

    # fmt: off
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0, *, alpha_warmup: int | None = None, eps: float = 1e-8, weight_decay: float = 0.0,
        max_grad_norm: float | None = None, peak_lr: float | None = None, maximize: bool = False,
        foreach: bool | None = None, capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        state_dtype: torch.dtype | None = None, storage: Storage = None, seed: int = 0, skip_nonfinite: bool = False,
        backend: Backend | None = None,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, alpha=alpha, alpha_warmup=alpha_warmup, eps=eps, weight_decay=weight_decay,
            max_grad_norm=max_grad_norm, peak_lr=peak_lr, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused, state_dtype=state_dtype, storage=storage, seed=seed,
            skip_nonfinite=skip_nonfinite, backend=backend,
        )
    # fmt: on
