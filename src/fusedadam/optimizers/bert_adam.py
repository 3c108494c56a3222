"""BertAdam: Adam as BERT was trained with, without bias correction, with clipping and a schedule of its own."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.base import FusedOptimizer, Params
from fusedadam.contract.common_options import OursAndTorchs, Unpack, takes
from fusedadam.contract.declarations import DERIVED, OPTIONS, Group, State
from fusedadam.rules.clipping import clip_factor, clipped_by_norm, group_norm, tensor_norm
from fusedadam.rules.ops import divide, maximum, sqrt, where
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule
from fusedadam.schedules import SCHEDULES, Schedule

CLIPS = ("parameter", "group", "all")


# fmt: off
def scheduled_lr(done: Scalar, lr: Scalar, warmup: Scalar, t_total: Scalar, schedule: Schedule) -> Any:
    """The learning rate after ``done`` steps."""
    return where(t_total > 0, lr * SCHEDULES[schedule](divide(done, maximum(t_total, 1.0)), warmup), lr)


def bert_adam_scalars(
    step: Scalar, lr: Scalar, warmup: Scalar, t_total: Scalar, schedule: Schedule,
    b1: Scalar, b2: Scalar, e: Scalar, weight_decay: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    return {
        "lr": scheduled_lr(step - 1, lr, warmup, t_total, schedule), "weight_decay": weight_decay,
        "beta1c": 1 - b1, "beta2": b2, "beta2c": 1 - b2, "eps": e, "max_grad_norm": max_grad_norm,
    }


@rule(scalars=bert_adam_scalars, reports=("grad_norm",))
def bert_adam(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, *,
    lr: Scalar, weight_decay: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar, eps: Scalar, max_grad_norm: Scalar,
    clip_parameter: Flag, clip_group: Flag, clip_all: Flag, maximize: Flag,
) -> Values:
    if maximize:
        grad = -grad
    if clip_parameter:
        grad = grad * clip_factor(tensor_norm(grad), max_grad_norm)
    elif clip_group:
        grad = grad * clip_factor(group_norm(grad), max_grad_norm)
    elif clip_all:
        grad, grad_norm = clipped_by_norm(grad, max_grad_norm)
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    update = exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * param
    param = param - lr * update
    return param, exp_avg, exp_avg_sq
# fmt: on


def clips_by(whose: str, group: Group) -> bool:
    """Whether a group's gradients are clipped by the norm of each parameter, of the group or of all."""
    norm = group.get("max_grad_norm")
    return norm is not None and float(norm) > 0 and group.get("clip", CLIPS[0]) == whose


class BertAdam(FusedOptimizer):
    r"""The Adam of BERT's training scripts: gradients clipped, no bias correction, a schedule built in.

    .. math::
        g_t \leftarrow g_t \min(1, c / (\lVert g_t \rVert + 10^{-6})), \quad
        p_t = p_{t-1} - \eta_t \left( \frac{m_t}{\sqrt{v_t} + \epsilon} + \lambda p_{t-1} \right)

    with :math:`\eta_t = \eta \cdot \text{schedule}(k / T)` after :math:`k` of :math:`T` steps, by the parameter's own
    count, which is part of the state: a training that is resumed goes on where it was.

    Args:
        params: as for :class:`AdamW`
        lr: learning rate, a number or a tensor of one element; torch's schedulers may change it on top of ``schedule``
        warmup: part of ``t_total`` in which the learning rate rises from 0, in [0, 1); -1 means none
        t_total: number of steps of the training; -1 means a constant learning rate, without ``schedule``
        schedule: ``"warmup_linear"``, ``"warmup_cosine"``, ``"warmup_constant"`` or ``"warmup_poly"``; the functions
            are in :mod:`fusedadam.schedules`
        b1, b2: decay of the two moments
        e: added to the denominator
        weight_decay: :math:`\lambda`, multiplied by the learning rate
        max_grad_norm: the norm :math:`c` that gradients are clipped to; 0, -1 or None means no clipping
        clip: whose norm: ``"parameter"`` (each its own), ``"group"`` (a group's gradients of one dtype) or ``"all"``
        maximize, foreach, capturable, differentiable, fused: as for :class:`AdamW`
        state_dtype, storage, offload, seed, skip_nonfinite, backend: as for :class:`AdamW`

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = BertAdam(model.parameters(), lr=1e-3, warmup=0.5, t_total=100)
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.get_lr()
        [2e-05, 2e-05]
    """

    rule = bert_adam
    states = {"exp_avg": State(decay="b1"), "exp_avg_sq": State(signed=False, decay="b2")}
    options = OPTIONS | {
        "warmup": checks.unless(-1, functools.partial(checks.number, below=1.0)),
        "t_total": checks.unless(-1, functools.partial(checks.number, low=1)),
        "schedule": functools.partial(checks.one_of, allowed=SCHEDULES),
        "b1": functools.partial(checks.number, below=1.0),
        "b2": functools.partial(checks.number, below=1.0),
        "e": checks.number,
        "max_grad_norm": checks.unless(-1, checks.max_grad_norm),
        "clip": functools.partial(checks.one_of, allowed=CLIPS),
    }
    derived = DERIVED | {f"clip_{whose}": functools.partial(clips_by, whose) for whose in CLIPS}
    also_called = {"next_m": "exp_avg", "next_v": "exp_avg_sq"}  # NVIDIA's

    @takes(OursAndTorchs)
    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, warmup: float = -1, t_total: int = -1,
        schedule: str = "warmup_linear", b1: float = 0.9, b2: float = 0.999, e: float = 1e-6,
        weight_decay: float = 0.01, max_grad_norm: float | None = 1.0, *, clip: str = "parameter",
        maximize: bool = False, **common: Unpack[OursAndTorchs],
    ) -> None: ...  # fmt: skip

    def get_lr(self) -> list[float]:
        """The learning rate that each parameter's next step will have."""
        rates = []
        for group in self.param_groups:
            options = [self.value(group, name) for name in ("lr", "warmup", "t_total", "schedule")]
            for param in group["params"]:
                done = float(self.state[param].get("step", 0)) if param in self.state else 0.0
                rates.append(float(scheduled_lr(done, *options)))
        return rates
