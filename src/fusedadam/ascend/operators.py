"""MindSpeed's operators: ours, under its names, with the dtypes and attributes of its documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.functional import Update, adam_options, adamw_flags, ema_choices
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.ema_adamw import ema_adam
from fusedadam.tensors.formats import names

__all__ = ["npu_apply_fused_adamw_v2", "npu_apply_fused_ema_adamw"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROLES = {"var": "param", "m": "exp_avg", "v": "exp_avg_sq", "max_grad_norm": "max_exp_avg_sq"}
EMA_ROLES = ("grad", "param", "exp_avg", "exp_avg_sq", "ema_params")


def npu_apply_fused_adamw_v2(
    var: Tensor, grad: Tensor, m: Tensor, v: Tensor, max_grad_norm: Tensor | None, step: Tensor | int,
    lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, weight_decay: float = 0.0, eps: float = 1e-8,
    amsgrad: bool = False, maximize: bool = False,
) -> None:  # fmt: skip
    """MindSpeed's AdamW: one step of :func:`fusedadam.functional.adamw_`, in place.

    Args:
        var, m, v: the parameter and its moments, of one dtype: float32, float16 or bfloat16
        grad: the gradient, of any of the three
        max_grad_norm: despite its name AMSGrad's running maximum of ``v``, of any of the three; needed with
            ``amsgrad``, otherwise it may be None and is not touched
        step: which step this is, the first being 1: an int64 tensor of one element, or an int
        lr, beta1, beta2, weight_decay, eps: float32 attributes: they are rounded to it before anything is computed
        amsgrad: divide by the largest second moment so far
        maximize: go up the gradient instead of down

    Example:
        >>> var, grad, m, v = (torch.full((2,), value) for value in (0.5, 0.5, 0.9, 0.9))
        >>> npu_apply_fused_adamw_v2(var, grad, m, v, None, torch.tensor([1]), lr=1e-2)
        >>> var
        tensor([0.4971, 0.4971])
    """
    flags = adamw_flags(amsgrad, maximize)
    attributes = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    rounded = {name: _float32(name, value) for name, value in adam_options(**attributes).items()}
    tensors = {"var": var, "grad": grad, "m": m, "v": v}
    if amsgrad and max_grad_norm is None:
        raise ValueError("max_grad_norm is None, but amsgrad=True keeps its running maximum there; pass a tensor")
    given = tensors | ({} if max_grad_norm is None else {"max_grad_norm": max_grad_norm})

    def check() -> None:
        _check_dtypes(given, "var", ("m", "v"))
        checks.alike(given, "var")  # the maximum too, even if it is not used

    if len(given) > len(tensors) and not amsgrad:  # the update does not see the maximum
        check()
    Update(adam, given if amsgrad else tensors, flags, _step(step), rounded, role_of=ROLES, check=check).run()


def npu_apply_fused_ema_adamw(
    grad: Tensor, var: Tensor, m: Tensor, v: Tensor, s: Tensor, step: Tensor | int, lr: float = 1e-3,
    ema_decay: float = 0.9999, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, mode: int = 1,
    bias_correction: bool = True, weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """MindSpeed's EMA-Adam: one step of :func:`fusedadam.functional.ema_adam_`, in place; returns ``var, m, v, s``.

    Args:
        grad, var, m, v, s: gradient, parameter, moments and the average of the parameter, of one dtype: float32,
            float16 or bfloat16
        step: which step this is, the first being 1: an int64 tensor of one element, or an int
        lr, ema_decay, beta1, beta2, eps, bias_correction, weight_decay: as for :func:`ema_adam_`
        mode: 1 for AdamW, 0 for weight decay that is added to the gradient

    Example:
        >>> grad, var, m, v, s = (torch.full((2,), value) for value in (1.0, 1.0, 0.0, 0.0, 1.0))
        >>> var, m, v, s = npu_apply_fused_ema_adamw(grad, var, m, v, s, 1, lr=0.5, ema_decay=0.5)
        >>> s
        tensor([0.7500, 0.7500])
    """
    tensors = {"grad": grad, "var": var, "m": m, "v": v, "s": s}
    ema_update(tensors, step, lr, ema_decay, beta1, beta2, eps, mode, bias_correction, weight_decay).run()
    return var, m, v, s


def ema_update(
    tensors: Mapping[str, Any], step: Any, lr: float, ema_decay: float, beta1: float, beta2: float, eps: float,
    mode: int, bias_correction: bool, weight_decay: float,
) -> Update:  # fmt: skip
    """The step, checked and ready to run. ``tensors``: in the order of EMA_ROLES, under the caller's names."""
    flags, options = ema_choices(lr, ema_decay, beta1, beta2, eps, mode, bias_correction, weight_decay)
    roles = dict(zip(tensors, EMA_ROLES, strict=True))
    _, var, *_ = tensors

    def check() -> None:
        _check_dtypes(tensors, var, tuple(name for name in tensors if name != var))

    return Update(ema_adam, tensors, flags, _step(step), options, role_of=roles, check=check)


def _check_dtypes(tensors: Mapping[str, Any], var: str, as_var: tuple[str, ...]) -> None:
    for name, value in tensors.items():
        checks.tensor(name, value, DTYPES)
    for name in as_var:
        if tensors[name].dtype != tensors[var].dtype:
            have, want = names([tensors[name].dtype]), names([tensors[var].dtype])
            raise RuntimeError(f"{name} has dtype {have}, but {var} has {want}; they must be equal")


def _step(step: Any) -> Any:
    if isinstance(step, (list, tuple)):
        raise TypeError(f"step is a {type(step).__name__}; it must be an int64 tensor of one element, or an int")
    if isinstance(step, Tensor) and (step.dtype != torch.int64 or step.shape not in ((1,), ())):
        raise TypeError(
            f"step is a tensor of shape {tuple(step.shape)} and {names([step.dtype])}; it must be int64, of shape (1,)"
        )
    return step


def _float32(name: str, value: float) -> float:
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if rounded > value and rounded == (1.0 if name.startswith("beta") else math.inf):
        raise ValueError(f"{name}={value!r} becomes {rounded} in float32, which this operator uses; it must be smaller")
    return rounded
