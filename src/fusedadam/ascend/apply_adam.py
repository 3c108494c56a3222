"""torch_npu's operators npu_apply_adam_w, npu_apply_adam and npu_bert_apply_adam.

They take the step not as a number but as what follows from it: the betas' powers, or no bias correction at all. So each
is the update of one of our rules, with scalars of its own. The vendor has deprecated the last two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.ascend.operators import check_dtypes
from fusedadam.functional import Update, adamw_flags
from fusedadam.optimizers.adamp import adamp
from fusedadam.optimizers.adamw import adam, scalars_of_powers
from fusedadam.rules.ops import sqrt
from fusedadam.rules.rule import Rule, Scalar

__all__ = ["npu_apply_adam", "npu_apply_adam_w", "npu_bert_apply_adam"]

Out: TypeAlias = tuple[Tensor, Tensor, Tensor]
ROLES = {"var": "param", "m": "exp_avg", "v": "exp_avg_sq", "max_grad_norm": "max_exp_avg_sq"}
MODES = (0, 1)


# fmt: off
def adam_w_scalars(
    step: Scalar, beta1_power: Scalar, beta2_power: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar,
    weight_decay: Scalar, max_grad_norm: Scalar,
) -> dict[str, Any]:
    """The powers are those of the step before."""
    power1, power2 = beta1_power * beta1, beta2_power * beta2
    return scalars_of_powers(power1, power2, lr, beta1, beta2, eps, weight_decay, max_grad_norm)


def tensorflow_scalars(
    step: Scalar, beta1_power: Scalar, beta2_power: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar
) -> dict[str, Any]:
    """TensorFlow corrects the learning rate, and not the second moment, so that epsilon weighs less at first."""
    corrected = scalars_of_powers(beta1_power, 0.0, lr * sqrt(1 - beta2_power), beta1, beta2, eps, 0.0, math.inf)
    return {**corrected, "beta1": beta1, "delta": 0.0, "projected_decay": 1.0}


def bert_scalars(
    step: Scalar, step_size: Scalar, lr: Scalar, beta1: Scalar, beta2: Scalar, eps: Scalar, weight_decay: Scalar
) -> dict[str, Any]:
    return {**scalars_of_powers(0.0, 0.0, lr, beta1, beta2, eps, weight_decay, math.inf), "step_size": step_size}
# fmt: on


ADAM_W = Rule(adam.update, adam_w_scalars, opening=adam.opening)
TENSORFLOWS = Rule(adamp.update, tensorflow_scalars)  # for a vector, AdamP is Adam with or without Nesterov momentum
BERT = Rule(adam.update, bert_scalars)


def npu_apply_adam_w(
    beta1_power: float, beta2_power: float, lr: float, weight_decay: float, beta1: float, beta2: float, epsilon: float,
    grad: Tensor, max_grad_norm: Tensor | None = None, amsgrad: bool | None = None, maximize: bool | None = None, *,
    out: Out,
) -> Out:  # fmt: skip
    """torch_npu's AdamW: one step of :func:`fusedadam.functional.adamw_`, in place; returns ``out``.

    Args:
        beta1_power, beta2_power: the betas to the power of the step *before* this one: 1 in the first step
        lr: learning rate
        weight_decay: decoupled weight decay
        beta1: decay of the first moment
        beta2: decay of the second moment
        epsilon: added to the denominator
        grad: the gradient: float32, float16 or bfloat16
        max_grad_norm: despite its name AMSGrad's running maximum of ``v``; needed with ``amsgrad``, which updates it,
            and otherwise not looked at
        amsgrad: divide by the largest second moment so far; None means False
        maximize: ascend the gradient instead of descending it; None means False
        out: ``(var, m, v)``, the parameter and its moments, of one dtype: float32, float16 or bfloat16

    Example:
        >>> grad, var, m, v = (torch.full((2,), value) for value in (1.0, 1.0, 0.0, 0.0))
        >>> var, m, v = npu_apply_adam_w(1.0, 1.0, 0.5, 0.0, 0.9, 0.999, 1e-8, grad, out=(var, m, v))
        >>> var
        tensor([0.5000, 0.5000])
    """
    flags = adamw_flags(amsgrad if amsgrad is not None else False, maximize if maximize is not None else False)
    options = {
        "beta1_power": checks.fraction("beta1_power", beta1_power),
        "beta2_power": checks.fraction("beta2_power", beta2_power),
        "weight_decay": checks.number("weight_decay", weight_decay),
        "max_grad_norm": math.inf,
        **_common(lr, beta1, beta2, epsilon),
    }
    tensors = _tensors(grad, out)
    if amsgrad:
        if max_grad_norm is None:
            raise ValueError("max_grad_norm is None, but amsgrad=True keeps its running maximum there; pass a tensor")
        tensors["max_grad_norm"] = max_grad_norm
    _run(ADAM_W, tensors, flags, options)
    return out


def npu_apply_adam(
    beta1_power: float, beta2_power: float, lr: float, beta1: float, beta2: float, epsilon: float, grad: Tensor,
    use_locking: bool | None = None, use_nesterov: bool | None = None, *, out: Out,
) -> Out:  # fmt: skip
    """torch_npu's Adam, which is TensorFlow's: one step, in place; returns ``out``. Deprecated by torch_npu.

    Args:
        beta1_power, beta2_power: the betas to the power of *this* step: the betas themselves in the first
        lr, beta1, beta2, grad: as for :func:`npu_apply_adam_w`
        epsilon: added to the root of the second moment, which is not corrected for its bias: lr is
        use_locking: accepted, and ignored: there is no lock
        use_nesterov: Nesterov momentum; None means False
        out: as for :func:`npu_apply_adam_w`

    Example:
        >>> grad, var, m, v = (torch.full((2,), value) for value in (1.0, 1.0, 0.0, 0.0))
        >>> var, m, v = npu_apply_adam(0.9, 0.999, 0.5, 0.9, 0.999, 1e-8, grad, False, False, out=(var, m, v))
        >>> var
        tensor([0.5000, 0.5000])
    """
    for name, value in {"use_locking": use_locking, "use_nesterov": use_nesterov}.items():
        checks.boolean(name, value, or_none=True)
    options = {
        "beta1_power": checks.number("beta1_power", beta1_power, below=1.0),
        "beta2_power": checks.number("beta2_power", beta2_power, below=1.0),
        **_common(lr, beta1, beta2, epsilon),
    }
    flags = {"nesterov": bool(use_nesterov), "maximize": False, "clipped": False, "matrix": False}
    _run(TENSORFLOWS, _tensors(grad, out), flags, options)
    return out


def npu_bert_apply_adam(
    lr: float, beta1: float, beta2: float, epsilon: float, grad: Tensor, max_grad_norm: float, global_grad_norm: float,
    weight_decay: float, step_size: float | None = None, adam_mode: int = 0, *, out: Out,
) -> Out:  # fmt: skip
    """torch_npu's Adam for BERT, without bias correction: one step, in place; returns ``out``. Deprecated by torch_npu.

    Args:
        lr, beta1, beta2, epsilon, grad: as for :func:`npu_apply_adam_w`
        max_grad_norm: in mode 0, gradients are divided by ``global_grad_norm / max_grad_norm`` where that is above 1;
            0 or less means that they are not
        global_grad_norm: the norm of all gradients, which the caller has computed
        weight_decay: decoupled weight decay
        step_size: in mode 1, the learning rate without that of weight decay, which is ``lr``; not used in mode 0
        adam_mode: 0 for BERT's Adam, 1 for mBART's
        out: as for :func:`npu_apply_adam_w`

    Example:
        >>> grad, var, m, v = (torch.full((2,), value) for value in (2.0, 1.0, 0.0, 0.0))
        >>> var, m, v = npu_bert_apply_adam(0.5, 0.9, 0.99, 1e-6, grad, 1.0, 2.0, 0.0, out=(var, m, v))
        >>> m
        tensor([0.1000, 0.1000])
    """
    if type(adam_mode) is not int or adam_mode not in MODES:
        raise ValueError(f"adam_mode={adam_mode!r} must be 0 (Adam of BERT) or 1 (Adam of mBART)")
    largest, norm = checks.real("max_grad_norm", max_grad_norm), checks.number("global_grad_norm", global_grad_norm)
    if math.isnan(largest):
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r} is out of range; it must be a number, 0 or less for no scaling"
        )
    if adam_mode == 1 and step_size is None:
        raise ValueError("step_size is None, but adam_mode=1 takes its step from it; pass a number")
    options = _common(lr, beta1, beta2, epsilon)
    options["weight_decay"] = checks.number("weight_decay", weight_decay)
    options["step_size"] = checks.number("step_size", step_size) if adam_mode == 1 else options["lr"]
    tensors = _tensors(grad, out)
    _check(tensors)
    if adam_mode == 0 and 0 < largest < norm:
        # in float32, as the update is: a copy, since the caller's gradient is not ours to scale
        tensors["grad"] = grad.detach().to(torch.float32) / (norm / largest)
    _run(BERT, tensors, adamw_flags(amsgrad=False, maximize=False), options)
    return out


def _common(lr: Any, beta1: Any, beta2: Any, epsilon: Any) -> dict[str, float]:
    return {
        "lr": checks.number("lr", lr),
        "beta1": checks.number("beta1", beta1, below=1.0),
        "beta2": checks.number("beta2", beta2, below=1.0),
        "eps": checks.number("epsilon", epsilon),
    }


def _tensors(grad: Any, out: Any) -> dict[str, Any]:
    if not isinstance(out, (tuple, list)) or len(out) != 3:
        kind = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out is a {kind}; it must be the tensors (var, m, v)")
    var, m, v = out
    return {"var": var, "grad": grad, "m": m, "v": v}


def _check(tensors: Mapping[str, Any]) -> None:
    check_dtypes(tensors, "var", ("m", "v"))


def _run(rule: Rule, tensors: Mapping[str, Any], flags: Mapping[str, bool], options: Mapping[str, float]) -> None:
    step = 1  # none of these rules asks for it
    Update(rule, tensors, flags, step, options, role_of=ROLES, check=lambda: _check(tensors)).run()
