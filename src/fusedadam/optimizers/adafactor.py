"""Adafactor: a second moment by row and column instead of by element (https://arxiv.org/abs/1804.04235)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, PEAK_LR, RELATIVE_TO_LR, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import divide, maximum, minimum, power, sqrt, sum_last, sum_second_last, tensor_sum
from fusedadam.rules.rule import ColumnValue, Flag, RowValue, Scalar, Value, Values, rule


# fmt: off
def adafactor_scalars(
    step: Scalar, lr: Scalar, beta2_decay: Scalar, eps1: Scalar, eps2: Scalar, d: Scalar, weight_decay: Scalar,
    max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "beta2c": power(step, beta2_decay), "rho": minimum(lr, divide(1.0, sqrt(step))), "decay": 1 - lr * weight_decay,
        "eps1": eps1, "eps2": eps2, "d": d, "max_grad_norm": max_grad_norm,
    }


def root_mean_square(x: Value, numel: Scalar) -> Value:
    return sqrt(tensor_sum(x * x) / numel)


@rule(scalars=adafactor_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def adafactor(
    param: Value, grad: Value, row_var: RowValue, col_var: ColumnValue, variance: Value, *,
    beta2c: Scalar, rho: Scalar, decay: Scalar, eps1: Scalar, eps2: Scalar, d: Scalar, max_grad_norm: Scalar,
    dtype_eps: Scalar, numel: Scalar, last_length: Scalar, second_last_length: Scalar,
    maximize: Flag, clipped: Flag, own_eps: Flag, matrix: Flag,
) -> Values:
    eps = eps1 if own_eps else dtype_eps
    if matrix:
        row_var = row_var + beta2c * (sum_last(grad * grad) / last_length - row_var)
        col_var = col_var + beta2c * (sum_second_last(grad * grad) / second_last_length - col_var)
        mean = sum_second_last(row_var) / second_last_length
        estimate = row_var / maximum(mean, eps) * col_var
    else:
        variance = variance + beta2c * (grad * grad - variance)
        estimate = variance
    update = grad / sqrt(maximum(estimate, eps * eps))
    step_size = rho * maximum(eps2, root_mean_square(param, numel)) / maximum(1.0, root_mean_square(update, numel) / d)
    param = param * decay - step_size * update
    return param, row_var, col_var, variance
# fmt: on


class Adafactor(FusedOptimizer):
    r"""Adafactor, a drop-in for :class:`torch.optim.Adafactor`
    (`arXiv 1804.04235 <https://arxiv.org/abs/1804.04235>`_).

    The second moment of a matrix is estimated from one average for each row, :math:`r`, and one for each column,
    :math:`c`, so that a parameter of :math:`n \times m` elements has :math:`n + m` of them instead of :math:`n m`:

    .. math::
        1 - \hat\beta_2 = t^{\tau}, \quad
        r_t = \hat\beta_2 r_{t-1} + (1 - \hat\beta_2) \, \tfrac{1}{m} \textstyle\sum_j g_{ij}^2, \quad
        c_t = \hat\beta_2 c_{t-1} + (1 - \hat\beta_2) \, \tfrac{1}{n} \sum_i g_{ij}^2, \quad
        \hat v_t = \frac{r_t c_t}{\max(\operatorname{mean}(r_t), \epsilon_1)}

    .. math::
        u_t = \frac{g_t}{\sqrt{\max(\hat v_t, \epsilon_1^2)}}, \quad
        \alpha_t = \max(\epsilon_2, \operatorname{RMS}(p_{t-1})) \min(\eta, 1 / \sqrt t), \quad
        p_t = (1 - \eta \lambda) \, p_{t-1} - \frac{\alpha_t}{\max(1, \operatorname{RMS}(u_t) / d)} \, u_t

    Parameters of more than two dimensions are matrices in their last two. Vectors have a second moment for each
    element.

    Args:
        params: parameters, or groups
        lr: the largest relative step :math:`\eta`
        beta2_decay: :math:`\tau`, negative: how the average becomes longer
        eps: :math:`\epsilon_1`, None for the smallest relative difference of the parameter's dtype (of float32 where
            ``storage`` keeps a bfloat16 weight with more bits), and :math:`\epsilon_2`, the least scale of a parameter
        d: the largest root mean square of an update
        weight_decay: :math:`\lambda`, decoupled
        foreach, maximize: as for :class:`AdamW`
        max_grad_norm, peak_lr, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = Adafactor(model.parameters(), lr=1e-2)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model.weight]["row_var"].shape)
        (3, 1)
    """

    rule = adafactor
    states = {"row_var": State(signed=False), "col_var": State(signed=False), "variance": State(signed=False)}
    options = OPTIONS | PEAK_LR | {
        "beta2_decay": checks.not_positive, "eps": checks.first_may_be_none, "d": checks.at_least_one,
    }  # fmt: skip
    derived = DERIVED | RELATIVE_TO_LR | {
        "eps1": lambda group: 0.0 if group["eps"][0] is None else group["eps"][0],
        "eps2": lambda group: group["eps"][1],
        "own_eps": lambda group: group["eps"][0] is not None,
    }  # fmt: skip

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-2, beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0, weight_decay: float = 0.0, *,
        peak_lr: float | None = None, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip
