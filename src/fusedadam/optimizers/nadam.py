"""NAdam: Adam with Nesterov's momentum (https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Ours, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import power, sqrt
from fusedadam.rules.rule import Flag, Scalar, TensorValue, Value, Values, rule


# fmt: off
def nadam_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar, anneal: Scalar,
    max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "decay": 1 - lr * weight_decay, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm, "lr": lr,
        "mu": beta1 * (1 - 0.5 * anneal**step), "mu_next": beta1 * (1 - 0.5 * (anneal * anneal**step)),
        "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2, "debias2": 1 / sqrt(1 - beta2**step), "eps": eps,
    }


@rule(scalars=nadam_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def nadam(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, mu_product: TensorValue, *,
    decay: Scalar, weight_decay: Scalar, lr: Scalar, mu: Scalar, mu_next: Scalar, beta1c: Scalar, beta2: Scalar,
    beta2c: Scalar, debias2: Scalar, eps: Scalar, max_grad_norm: Scalar, maximize: Flag, decoupled: Flag, clipped: Flag,
) -> Values:
    if decoupled:
        param = param * decay
    else:
        grad = grad + weight_decay * param
    mu_product = mu_product * mu
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    from_grad = lr * (1 - mu) / (1 - mu_product)
    from_average = lr * mu_next / (1 - mu_product * mu_next)
    param = param - (from_grad * grad + from_average * exp_avg) / (sqrt(exp_avg_sq) * debias2 + eps)
    return param, exp_avg, exp_avg_sq, mu_product
# fmt: on


class NAdam(FusedOptimizer):
    r"""NAdam, a drop-in for :class:`torch.optim.NAdam`
    (`Dozat, 2016 <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>`_).

    .. math::
        \mu_t = \beta_1 \left(1 - \tfrac{1}{2} \, 0.96^{t \psi}\right), \quad
        p_t = p_{t-1} - \eta \left(
        \frac{1 - \mu_t}{1 - \prod_{i \le t} \mu_i} \, g_t
        + \frac{\mu_{t+1}}{1 - \prod_{i \le t + 1} \mu_i} \, m_t
        \right) \Big/ \left(\sqrt{\hat v_t} + \epsilon\right)

    with the moments :math:`m` and :math:`v` of Adam. The product of all :math:`\mu_i` is a state with one value for
    each parameter, ``mu_product``.

    Args:
        params, lr, betas, eps: as for :class:`AdamW`
        weight_decay: :math:`\lambda`, an L2 penalty that is added to the gradient after clipping, or decoupled
        momentum_decay: :math:`\psi`, how fast the momentum warms up
        decoupled_weight_decay: weights decay by themselves, as AdamW's
        foreach, maximize, capturable, differentiable: as for :class:`AdamW`
        max_grad_norm, peak_lr, state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = NAdam(model.parameters(), lr=2e-3)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = nadam
    takes_complex = True
    states = {
        "exp_avg": State(decay="beta1"), "exp_avg_sq": State(signed=False, decay="beta2"),
        "mu_product": State(initial="one", signed=False),
    }  # fmt: skip
    options = OPTIONS | PEAK_LR | {
        "betas": checks.betas, "eps": checks.number, "momentum_decay": checks.number,
        "decoupled_weight_decay": checks.boolean,
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR | {
        "decoupled": lambda group: group["decoupled_weight_decay"],
        "anneal": lambda group: power(0.96, float(group["momentum_decay"])),
    }  # fmt: skip

    @takes(Ours)
    def __init__(
        self, params: Params, lr: float | Tensor = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False, *,
        foreach: bool | None = None, maximize: bool = False, capturable: bool = False, differentiable: bool = False,
        max_grad_norm: float | None = None, peak_lr: float | None = None, **common: Unpack[Ours],
    ) -> None: ...  # fmt: skip
