"""AdamW and Adam: one rule, since they differ only in where weight decay enters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.optimizer import FusedOptimizer, Group, Params
from fusedadam.rule import Flag, Scalar, Value, Values, rule
from fusedadam.words import maximum, sqrt


def adam_scalars(
    step: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar
) -> dict[str, Any]:
    return {
        "decay": 1 - lr * weight_decay,
        "weight_decay": weight_decay,
        "beta1c": 1 - beta1,
        "beta2": beta2,
        "beta2c": 1 - beta2,
        "step_size": lr / (1 - beta1**step),
        "debias2": (1 - beta2**step) ** -0.5,
        "eps": eps,
    }


# fmt: off
@rule(scalars=adam_scalars)
def adam(
    param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value, max_exp_avg_sq: Value, *,
    decay: Scalar, weight_decay: Scalar, beta1c: Scalar, beta2: Scalar, beta2c: Scalar,
    step_size: Scalar, debias2: Scalar, eps: Scalar, amsgrad: Flag, maximize: Flag, decoupled: Flag,
) -> Values:
    if maximize:
        grad = -grad
    if decoupled:
        param = param * decay
    else:
        grad = grad + weight_decay * param
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + beta2c * grad * grad
    if amsgrad:
        max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq)
    largest = max_exp_avg_sq if amsgrad else exp_avg_sq
    param = param - step_size * exp_avg / (sqrt(largest) * debias2 + eps)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq
# fmt: on


class AdamW(FusedOptimizer):
    rule = adam
    fixed = {"decoupled": True}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                amsgrad=amsgrad,
                maximize=maximize,
                foreach=foreach,
                capturable=capturable,
                differentiable=differentiable,
                fused=fused,
                state_dtype=state_dtype,
                backend=backend,
            ),
        )

    def check(self, group: Group) -> None:
        super().check(group)
        checks.betas(group["betas"])
        checks.number("eps", group["eps"])
        checks.boolean("amsgrad", group["amsgrad"])


class Adam(AdamW):
    fixed = {"decoupled": False}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            state_dtype=state_dtype,
            backend=backend,
        )
