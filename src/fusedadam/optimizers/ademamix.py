"""AdEMAMix: AdamW with a second, much slower average of gradients (https://arxiv.org/abs/2409.03137)."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import divide, exp, log, minimum, sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def ademamix_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, beta3: Scalar, log_beta1: Scalar, log_beta3: Scalar,
    schedule: Literal["constant", "warmup"], beta3_warmup: Scalar, alpha: Scalar, alpha_warmup: Scalar, eps: Scalar,
    weight_decay: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    if schedule == "warmup":
        progress = minimum(divide(step, beta3_warmup), 1.0)
        # linear, from beta1's half-life to beta3's; below 0 even if both betas are 0
        memory = minimum(divide(1 - progress, log_beta1) + divide(progress, log_beta3), -1e-300)
        beta3 = where(progress < 1, exp(divide(1.0, memory)), beta3)
    return {
        "decay": 1 - lr * weight_decay, "max_grad_norm": max_grad_norm, "lr": lr, "eps": eps,
        "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2, "beta3c": 1 - beta3,
        "alpha": alpha * minimum(divide(step, alpha_warmup), 1.0),
        "debias1": 1 / (1 - beta1**step), "debias2": 1 / sqrt(1 - beta2**step),
    }


@rule(scalars=ademamix_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def ademamix(
    param: Value, grad: Value, exp_avg_fast: Value, exp_avg_slow: Value, exp_avg_sq: Value, *,
    decay: Scalar, lr: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar, beta3c: Scalar, alpha: Scalar,
    debias1: Scalar, debias2: Scalar, eps: Scalar, max_grad_norm: Scalar, maximize: Flag, clipped: Flag,
) -> Values:
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
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
        s_t = \beta_{3,t} s_{t-1} + (1 - \beta_{3,t}) g_t, \quad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
        p_t = (1 - \eta\lambda) p_{t-1}
        - \eta \frac{m_t / (1 - \beta_1^t) + \alpha_t s_t}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}, \quad
        \alpha_t = \alpha \min(t / T_\alpha, 1), \quad
        \frac{1}{\ln \beta_{3,t}} = \frac{1 - a}{\ln \beta_1} + \frac{a}{\ln \beta_3}, \quad
        a = \min(t / T_{\beta_3}, 1)

    Args:
        params, lr, eps, weight_decay: as for :class:`AdamW`
        betas: decay of the fast average, of the squares, and of the slow average
        alpha: how much of the slow average is added
        alpha_warmup: :math:`T_\alpha`, the number of steps in which ``alpha`` grows from 0; None means no warmup
        beta3_warmup: :math:`T_{\beta_3}`, the number of steps in which the half-life of the slow average grows from
            that of the fast one; None means no warmup
        max_grad_norm, peak_lr, maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdEMAMix(model.parameters(), lr=1e-3, alpha_warmup=1000, beta3_warmup=1000)
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
        "alpha_warmup": checks.warmup_steps, "beta3_warmup": checks.warmup_steps,
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR | {
        "alpha_warmup": lambda group: group["alpha_warmup"] or 1,
        "beta3_warmup": lambda group: group["beta3_warmup"] or 1,
        "schedule": lambda group: "constant" if group["beta3_warmup"] is None else "warmup",
        "log_beta1": lambda group: log(float(group["betas"][0])),
        "log_beta3": lambda group: log(float(group["betas"][2])),
    }  # fmt: skip

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0, *, alpha_warmup: int | None = None, beta3_warmup: int | None = None, eps: float = 1e-8,
        weight_decay: float = 0.0, peak_lr: float | None = None, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip
