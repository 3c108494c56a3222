"""SGD: stochastic gradient descent, with momentum or without."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import OPTIONS, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def sgd_scalars(
    step: Scalar, lr: Scalar, momentum: Scalar, dampening: Scalar, weight_decay: Scalar, max_grad_norm: Scalar
) -> dict[str, Any]:
    return {
        "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm,
        "undampened": where(step == 1, 1.0, 1 - dampening),  # the buffer begins as the first gradient, whole
    }


@rule(scalars=sgd_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def sgd(
    param: Value, grad: Value, momentum_buffer: Value, *,
    lr: Scalar, momentum: Scalar, undampened: Scalar, weight_decay: Scalar, max_grad_norm: Scalar,
    with_momentum: Flag, nesterov: Flag, maximize: Flag, clipped: Flag,
) -> Values:
    grad = grad + weight_decay * param
    if with_momentum:
        momentum_buffer = momentum * momentum_buffer + undampened * grad
        grad = grad + momentum * momentum_buffer if nesterov else momentum_buffer
    param = param - lr * grad
    return param, momentum_buffer
# fmt: on


class SGD(FusedOptimizer):
    r"""SGD, a drop-in for :class:`torch.optim.SGD`.

    .. math::
        g_t \leftarrow g_t + \lambda p_{t-1}, \quad b_t = \mu b_{t-1} + (1 - \tau) g_t, \quad
        p_t = p_{t-1} - \eta b_t

    where :math:`b_1 = g_1`. With ``nesterov`` the step is :math:`\eta (g_t + \mu b_t)`, and without momentum it is
    :math:`\eta g_t`: then there is no buffer.

    Args:
        params: as for :class:`AdamW`
        lr: learning rate; a number, or a tensor of one element
        momentum: how much of the buffer is kept, :math:`\mu`; 0 means no buffer. If it is switched on later, the buffer
            begins as :math:`(1 - \tau) g`, where torch's begins as :math:`g`
        dampening: :math:`\tau`, from the second step on
        weight_decay: an L2 penalty: :math:`\lambda`, added to the gradient after clipping
        nesterov: Nesterov's momentum; needs a momentum and no dampening
        maximize, foreach, differentiable, fused: as for :class:`AdamW`
        max_grad_norm, capturable, state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = sgd
    takes_complex = True
    states = {"momentum_buffer": State(decay="momentum")}
    options = OPTIONS | {"momentum": checks.number, "dampening": checks.finite, "nesterov": checks.boolean}
    step_if_uncounted = 1.0  # torch's has no count; if there is a buffer, the first step has been taken

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, momentum: float = 0, dampening: float = 0,
        weight_decay: float | Tensor = 0, nesterov: bool = False, **common: Unpack[Common],
    ) -> None:  # fmt: skip
        # here alone, as in torch: later, a schedule may take momentum to 0 and back
        if nesterov and (checks.number("momentum", momentum) == 0 or checks.finite("dampening", dampening) != 0):
            raise ValueError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}: it needs a momentum above 0 and "
                "dampening=0"
            )
