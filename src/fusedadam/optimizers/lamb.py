"""Lamb: Adam with a step for each parameter as long as its weights allow (https://arxiv.org/abs/1904.00962)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import Common, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, Group, State, clips
from fusedadam.rules.clipping import clip_factor, tensor_norm, total_norm
from fusedadam.rules.ops import minimum, sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule


# fmt: off
def lamb_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar,
    bias_correction: Scalar, max_weight_norm: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "lr": lr, "eps": eps, "weight_decay": weight_decay,
        "beta1c": 1 - beta1, "debias1": where(bias_correction > 0, 1 / (1 - beta1**step), 1.0),
        "beta2": beta2, "beta2c": 1 - beta2, "debias2": where(bias_correction > 0, 1 / sqrt(1 - beta2**step), 1.0),
        "max_weight_norm": max_weight_norm, "max_grad_norm": max_grad_norm,
    }


@rule(scalars=lamb_scalars, reports=("grad_norm", "trust_ratio"))
def lamb(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, *,
    lr: Scalar, eps: Scalar, weight_decay: Scalar, beta1c: Scalar, debias1: Scalar, beta2: Scalar, beta2c: Scalar,
    debias2: Scalar, max_weight_norm: Scalar, max_grad_norm: Scalar,
    adam: Flag, maximize: Flag, clipped: Flag, use_global_grad_norm: Flag,
) -> Values:
    if maximize:
        grad = -grad
    if clipped or use_global_grad_norm:
        grad_norm = total_norm(grad)  # one for both, so that groups of either kind count together
    if clipped:
        grad = grad * clip_factor(grad_norm, max_grad_norm)
    elif use_global_grad_norm:
        grad = grad / where(grad_norm > 1, grad_norm, 1.0)
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    update = exp_avg * debias1 / (sqrt(exp_avg_sq) * debias2 + eps) + weight_decay * param
    if not adam:
        weight_norm, update_norm = minimum(tensor_norm(param), max_weight_norm), tensor_norm(update)
        trust_ratio = where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        update = trust_ratio * update
    param = param - lr * update
    return param, exp_avg, exp_avg_sq
# fmt: on


class Lamb(FusedOptimizer):
    r"""LAMB (`arXiv 1904.00962 <https://arxiv.org/abs/1904.00962>`_), for large batches: the step of Adam, scaled for
    each parameter by how large its weights are.

    .. math::
        u = \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon} + \lambda p_{t-1}, \quad
        p_t = p_{t-1} - \eta \, \frac{\lVert p_{t-1} \rVert}{\lVert u \rVert} \, u

    The trust ratio :math:`\lVert p \rVert / \lVert u \rVert` is 1 where either norm is 0.

    Args:
        params, lr, betas, eps: as for :class:`AdamW`
        weight_decay: :math:`\lambda`, part of the update whose norm is taken
        bias_correction: divide the moments by :math:`1 - \beta^t`
        max_weight_norm: a limit of :math:`\lVert p \rVert` in the ratio; the paper and apex have none, torch_npu has 10
        adam: a trust ratio of 1, which makes it AdamW; for groups of biases and norms, for example
        use_global_grad_norm: divide the gradients by the norm of all of them together where that is above 1;
            ``max_grad_norm`` does nearly the same, to any norm
        max_grad_norm, maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Lamb(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.trust_ratios()[model.weight] > 0
        True
    """

    rule = lamb
    states = {"exp_avg": State(decay="beta1"), "exp_avg_sq": State(signed=False, decay="beta2")}
    options = OPTIONS | {
        "betas": checks.betas, "eps": checks.number, "bias_correction": checks.boolean, "adam": checks.boolean,
        "max_weight_norm": checks.max_weight_norm, "use_global_grad_norm": checks.boolean,
    }  # fmt: skip
    derived = DERIVED | {
        "max_weight_norm": lambda group: math.inf if group["max_weight_norm"] is None else group["max_weight_norm"]
    }

    @takes(Common)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01, *, bias_correction: bool = True, max_weight_norm: float | None = None,
        adam: bool = False, use_global_grad_norm: bool = False, **common: Unpack[Common],
    ) -> None: ...  # fmt: skip

    @classmethod
    def check(cls, group: Group, names: Iterable[str] | None = None) -> None:
        super().check(group, names)
        if group.get("use_global_grad_norm") and clips(group):
            raise ValueError(
                f"use_global_grad_norm=True and max_grad_norm={group['max_grad_norm']} exclude each other: both scale "
                "gradients by the norm of all of them; leave one out"
            )

    def trust_ratios(self) -> dict[Tensor, float]:
        """The factor that scaled each parameter's last step; 1 if nothing did. Waits for the device."""
        ratios = self._report("trust_ratio")
        return {p: ratios.get(k, 1.0) if p.numel() else 1.0 for k, p in enumerate(self._params())}
