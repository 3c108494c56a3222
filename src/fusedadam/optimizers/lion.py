"""Lion: steps of one length, in the direction of a momentum's sign (https://arxiv.org/abs/2302.06675)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import sign
from fusedadam.rules.restraint import agreement
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def lion_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, weight_decay: Scalar, max_grad_norm: Scalar
) -> dict[str, Any]:
    return {
        "lr": lr, "decay": 1 - lr * weight_decay, "beta1c": 1 - beta1, "beta2c": 1 - beta2,
        "max_grad_norm": max_grad_norm,
    }


@rule(scalars=lion_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def lion(
    param: Value, grad: Value, exp_avg: Value, *,
    lr: Scalar, decay: Scalar, beta1c: Scalar, beta2c: Scalar, max_grad_norm: Scalar, numel: Scalar,
    maximize: Flag, clipped: Flag, cautious: Flag,
) -> Values:
    update = sign(exp_avg + beta1c * (grad - exp_avg))
    if cautious:
        update = update * agreement(update, grad, numel)
    param = param * decay - lr * update
    exp_avg = exp_avg + beta2c * (grad - exp_avg)
    return param, exp_avg
# fmt: on


class Lion(FusedOptimizer):
    r"""Lion (`arXiv 2302.06675 <https://arxiv.org/abs/2302.06675>`_): every weight moves by the learning rate, up or
    down.

    .. math::
        u_t = \operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t), \quad
        p_t = (1 - \eta\lambda) p_{t-1} - \eta u_t, \quad m_t = \beta_2 m_{t-1} + (1 - \beta_2) g_t

    Args:
        params: as for :class:`AdamW`
        lr: learning rate; a number, or a tensor of one element. The authors recommend a third to a tenth of AdamW's
        betas: how much of the momentum enters the step, and how much of it is kept
        weight_decay: decoupled weight decay; the authors recommend three to ten times AdamW's
        max_grad_norm, peak_lr, maximize, cautious, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = lion
    states = {"exp_avg": State(decay="beta2")}
    options = OPTIONS | PEAK_LR | {"betas": checks.betas, "cautious": checks.boolean}
    derived = DERIVED | RELATIVE_TO_LR
    step_if_uncounted = 1.0  # other packages keep no count, and nothing depends on it

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0, *, peak_lr: float | None = None, cautious: bool = False, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip
