"""RMSprop, torch's and TensorFlow's: one rule, since they differ in where eps, lr and weight decay enter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Ours, Unpack, takes
from fusedadam.contract.declarations import OPTIONS, State
from fusedadam.rules.clipping import maximized_and_clipped
from fusedadam.rules.ops import sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def rmsprop_scalars(
    step: Scalar, lr: Scalar, alpha: Scalar, eps: Scalar, weight_decay: Scalar, momentum: Scalar,
    lr_in_momentum: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "alpha": alpha, "alphac": 1 - alpha, "eps": eps, "momentum": momentum, "max_grad_norm": max_grad_norm,
        "weight_decay": weight_decay, "decay": 1 - weight_decay,  # TensorFlow's decay has no lr
        "lr_before": where(lr_in_momentum > 0, lr, 1.0), "lr_after": where(lr_in_momentum > 0, 1.0, lr),
    }


@rule(scalars=rmsprop_scalars, reports=("grad_norm",), opening=maximized_and_clipped)
def rmsprop(
    param: Value, grad: Value, square_avg: Value, grad_avg: Value, momentum_buffer: Value, *,
    alpha: Scalar, alphac: Scalar, eps: Scalar, momentum: Scalar, weight_decay: Scalar, decay: Scalar,
    lr_before: Scalar, lr_after: Scalar, max_grad_norm: Scalar, centered: Flag, with_momentum: Flag,
    eps_in_root: Flag, decoupled_decay: Flag, maximize: Flag, clipped: Flag,
) -> Values:
    if decoupled_decay:
        param = param * decay
    else:
        grad = grad + weight_decay * param
    square_avg = alpha * square_avg + alphac * grad * grad
    if centered:
        grad_avg = grad_avg + alphac * (grad - grad_avg)
    variance = square_avg - grad_avg * grad_avg if centered else square_avg
    update = lr_before * grad / (sqrt(variance + eps) if eps_in_root else sqrt(variance) + eps)
    if with_momentum:
        momentum_buffer = momentum * momentum_buffer + update
        update = momentum_buffer
    param = param - lr_after * update
    return param, square_avg, grad_avg, momentum_buffer
# fmt: on


class RMSprop(FusedOptimizer):
    r"""RMSprop, a drop-in for :class:`torch.optim.RMSprop`.

    .. math::
        g_t \leftarrow g_t + \lambda p_{t-1}, \quad v_t = \alpha v_{t-1} + (1 - \alpha) g_t^2, \quad
        b_t = \mu b_{t-1} + \frac{g_t}{\sqrt{v_t} + \epsilon}, \quad p_t = p_{t-1} - \eta b_t

    With ``centered`` it keeps :math:`a_t = \alpha a_{t-1} + (1 - \alpha) g_t` as well, and divides by
    :math:`\sqrt{v_t - a_t^2} + \epsilon`.

    Args:
        params: as for :class:`AdamW`
        lr: learning rate; a number, or a tensor of one element
        alpha: decay of the averages
        eps: added to the denominator
        weight_decay: an L2 penalty: :math:`\lambda`, added to the gradient after clipping
        momentum: how much of the buffer :math:`b` is kept, :math:`\mu`; 0 means no buffer
        centered: divide by an estimate of the standard deviation of the gradient
        capturable, foreach, maximize, differentiable, fused: as for :class:`AdamW`
        max_grad_norm, state_dtype, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`
        storage: as for :class:`AdamW`; with ``centered``, the two averages stay float32

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = RMSprop(model.parameters(), lr=1e-2, momentum=0.9)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = rmsprop
    takes_complex = True
    states = {
        "square_avg": State(signed=False, decay="alpha"),
        "grad_avg": State(decay="alpha", subtracted_from="square_avg"),
        "momentum_buffer": State(decay="momentum"),
    }
    options = OPTIONS | {
        "alpha": checks.number, "eps": checks.number, "momentum": checks.number, "centered": checks.boolean
    }  # fmt: skip
    fixed = {"eps_in_root": False, "decoupled_decay": False, "lr_in_momentum": False}

    @takes(Ours)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-2, alpha: float = 0.99, eps: float = 1e-8,
        weight_decay: float = 0, momentum: float = 0, centered: bool = False, capturable: bool = False,
        foreach: bool | None = None, maximize: bool = False, differentiable: bool = False, *,
        fused: bool | None = None, max_grad_norm: float | None = None, **common: Unpack[Ours],
    ) -> None: ...  # fmt: skip


class RMSpropTF(FusedOptimizer):
    r"""RMSprop as TensorFlow has it, with which EfficientNet, MnasNet and others were trained.

    .. math::
        v_t = \alpha v_{t-1} + (1 - \alpha) g_t^2, \quad
        b_t = \mu b_{t-1} + \eta \frac{g_t}{\sqrt{v_t + \epsilon}}, \quad p_t = p_{t-1} - b_t

    It differs from :class:`RMSprop` in four places: :math:`v_0 = 1`, so that the first steps are small;
    :math:`\epsilon` is inside the root; the learning rate is inside the buffer, so that a change of it acts on later
    gradients only; and weight decay may be decoupled.

    Args:
        params, lr, alpha, momentum, centered: as for :class:`RMSprop`
        eps: added inside the root
        weight_decay: :math:`\lambda`: an L2 penalty, added to the gradient after clipping; see ``decoupled_decay``
        decoupled_decay: multiply the parameter by :math:`1 - \lambda` instead, without the learning rate
        lr_in_momentum: False multiplies by the learning rate after the buffer, as :class:`RMSprop` does
        maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        max_grad_norm, state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`RMSprop`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = RMSpropTF(model.parameters(), lr=1e-2, momentum=0.9)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
    """

    rule = rmsprop
    states = RMSprop.states | {"square_avg": State(initial="one", signed=False, decay="alpha")}
    options = RMSprop.options | {"decoupled_decay": checks.boolean, "lr_in_momentum": checks.boolean}
    fixed = {"eps_in_root": True}

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-2, alpha: float = 0.9, eps: float = 1e-10,
        weight_decay: float = 0, momentum: float = 0.0, centered: bool = False, decoupled_decay: bool = False,
        lr_in_momentum: bool = True, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip
