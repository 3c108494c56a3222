"""RAdam: Adam that waits until its second moment can be trusted (https://arxiv.org/abs/1908.03265)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Ours, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import divide, maximum, sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def radam_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar, max_grad_norm: Scalar
) -> dict[str, Any]:
    longest = divide(2.0, 1 - beta2) - 1  # rho: how many gradients the second moment averages, and at most
    length = longest - divide(2 * step * beta2**step, 1 - beta2**step)
    known, most = maximum(length, 5.0), maximum(longest, 5.0)  # below 5 nothing is rectified
    rectification = sqrt(divide((known - 4) * (known - 2) * most, (most - 4) * (most - 2) * known))
    return {
        "decay": 1 - lr * weight_decay, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
        "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2,
        "step_size": divide(lr, 1 - beta1**step) * where(length > 5, rectification * sqrt(1 - beta2**step), 1.0),
        "is_rectified": where(length > 5, 1.0, 0.0), "eps": eps,
    }


@rule(scalars=radam_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def radam(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, *,
    decay: Scalar, weight_decay: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar, step_size: Scalar,
    is_rectified: Scalar, eps: Scalar, max_grad_norm: Scalar, maximize: Flag, decoupled: Flag, clipped: Flag,
) -> Values:
    if decoupled:
        param = param * decay
    else:
        grad = grad + weight_decay * param
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    param = param - step_size * exp_avg / where(is_rectified > 0, sqrt(exp_avg_sq) + eps, 1.0)
    return param, exp_avg, exp_avg_sq
# fmt: on


class RAdam(FusedOptimizer):
    r"""RAdam, a drop-in for :class:`torch.optim.RAdam`
    (`arXiv 1908.03265 <https://arxiv.org/abs/1908.03265>`_).

    .. math::
        \rho_\infty = \frac{2}{1 - \beta_2} - 1, \quad
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1 - \beta_2^t}, \quad
        r_t = \sqrt{\frac{(\rho_t - 4)(\rho_t - 2)\rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2)\rho_t}}, \quad
        p_t = p_{t-1} - \eta \frac{m_t}{1 - \beta_1^t} \, r_t \frac{\sqrt{1 - \beta_2^t}}{\sqrt{v_t} + \epsilon}

    where :math:`\rho_t > 5`. Before that, in the first steps, the moment alone decides:
    :math:`p_t = p_{t-1} - \eta m_t / (1 - \beta_1^t)`.

    Args:
        params, lr, betas, eps: as for :class:`AdamW`
        weight_decay: :math:`\lambda`, an L2 penalty that is added to the gradient after clipping, or decoupled
        decoupled_weight_decay: weights decay by themselves, as AdamW's
        foreach, maximize, capturable, differentiable: as for :class:`AdamW`
        max_grad_norm, peak_lr, state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = RAdam(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = radam
    takes_complex = True
    states = {"exp_avg": State(decay="beta1"), "exp_avg_sq": State(signed=False, decay="beta2")}
    options = OPTIONS | PEAK_LR | {
        "betas": checks.betas, "eps": checks.number, "decoupled_weight_decay": checks.boolean
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR | {"decoupled": lambda group: group["decoupled_weight_decay"]}

    @takes(Ours)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, decoupled_weight_decay: bool = False, *, foreach: bool | None = None,
        maximize: bool = False, capturable: bool = False, differentiable: bool = False,
        max_grad_norm: float | None = None, peak_lr: float | None = None, **common: Unpack[Ours],
    ) -> None: ...  # fmt: skip
