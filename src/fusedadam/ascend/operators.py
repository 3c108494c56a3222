"""MindSpeed's operators: ours, under its names, with the dtypes and attributes of its documents."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.formats import names
from fusedadam.functional import Update, adamw_flags, ema_choices
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.ema_adamw import ema_adam

__all__ = ["fused_ema_adamw", "npu_apply_fused_adamw_v2", "npu_apply_fused_ema_adamw"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EMA_ROLES = ("grad", "param", "exp_avg", "exp_avg_sq", "ema_params")
ADAMW_ROLES = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
ATTRIBUTES = ("lr", "beta1", "beta2", "weight_decay", "eps")

# What npu_apply_fused_adamw_v2's tensors and attributes are called: by its page, and by MindSpeed's code
Spelling: TypeAlias = tuple[str, ...]
PAGES: Spelling = ("var", "grad", "m", "v", "max_grad_norm", "step", *ATTRIBUTES)
MINDSPEEDS: Spelling = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state_step", *ATTRIBUTES)


def in_both_spellings(function: Callable[..., None]) -> Callable[..., None]:
    """Lets npu_apply_fused_adamw_v2 take its tensors by keyword under MindSpeed's names, too."""
    theirs = {other: own for own, other in zip(PAGES, MINDSPEEDS, strict=True) if own != other}
    ours = inspect.signature(function)
    names = dict(zip(PAGES, MINDSPEEDS, strict=True))
    signature = ours.replace(parameters=[p.replace(name=names.get(p.name, p.name)) for p in ours.parameters.values()])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        given = [name for name in kwargs if name in theirs]
        if not given:
            return function(*args, **kwargs)
        for name in given:
            if theirs[name] in (*kwargs, *PAGES[: len(args)]):
                raise TypeError(f"{name} and {theirs[name]} are two names of one argument; pass only one of them")
        mixed = [name for name in kwargs if name in theirs.values()]
        if mixed:
            raise TypeError(
                f"{mixed[0]} is the page's name and {given[0]} is MindSpeed's; use one spelling for all tensors"
            )
        bound = signature.bind(*args, **kwargs)  # under their names, which errors then have
        bound.apply_defaults()
        return adamw_v2_update(MINDSPEEDS, *bound.arguments.values()).run()

    return call


@in_both_spellings
def npu_apply_fused_adamw_v2(
    var: Tensor, grad: Tensor, m: Tensor, v: Tensor, max_grad_norm: Tensor | None, step: Tensor | int,
    lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, weight_decay: float = 0.0, eps: float = 1e-8,
    amsgrad: bool = False, maximize: bool = False,
) -> None:  # fmt: skip
    """MindSpeed's AdamW: one step of :func:`fusedadam.functional.adamw_`, in place.

    The names are those of the operator's page. By keyword, the tensors may also have the names of MindSpeed's code:
    ``param``, ``grad``, ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq`` and ``state_step``.

    Args:
        var, m, v: the parameter and its moments, of one dtype: float32, float16 or bfloat16
        grad: the gradient, of any of the three
        max_grad_norm: despite its name AMSGrad's running maximum of ``v``, of any of the three; needed with
            ``amsgrad``, otherwise it may be None and is not touched
        step: which step this is, the first being 1: an int64 tensor of one element, or an int
        lr, beta1, beta2, weight_decay, eps: float32 attributes: they are rounded to it before anything is computed
        amsgrad: divide by the largest second moment so far
        maximize: ascend the gradient instead of descending it

    Example:
        >>> var, grad, m, v = (torch.full((2,), value) for value in (0.5, 0.5, 0.9, 0.9))
        >>> npu_apply_fused_adamw_v2(var, grad, m, v, None, torch.tensor([1]), lr=1e-2)
        >>> var
        tensor([0.4971, 0.4971])
    """
    adamw_v2_update(
        PAGES, var, grad, m, v, max_grad_norm, step, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize
    ).run()


def adamw_v2_update(
    spelling: Spelling, var: Any, grad: Any, m: Any, v: Any, largest: Any, step: Any, lr: Any, beta1: Any, beta2: Any,
    weight_decay: Any, eps: Any, amsgrad: bool, maximize: bool,
) -> Update:  # fmt: skip
    """The step, checked and ready to run. ``spelling``: what the caller calls the first eleven arguments."""
    flags = adamw_flags(amsgrad, maximize)
    attributes = zip(ATTRIBUTES, spelling[-len(ATTRIBUTES) :], (lr, beta1, beta2, weight_decay, eps), strict=True)
    rounded = {name: _float32(called, value, name.startswith("beta")) for name, called, value in attributes}
    tensors = dict(zip(spelling, (var, grad, m, v), strict=False))
    called = spelling[len(tensors)]
    if amsgrad and largest is None:
        raise ValueError(f"{called} is None, but amsgrad=True keeps its running maximum there; pass a tensor")
    given = tensors if largest is None else tensors | {called: largest}
    param, _, *moments = tensors

    def check() -> None:
        check_dtypes(given, param, moments)
        checks.alike(given, param)  # the maximum too, even if it is not used

    if len(given) > len(tensors) and not amsgrad:  # the update does not see the maximum
        check()
    roles = dict(zip(spelling, ADAMW_ROLES, strict=False))
    options = {**rounded, "max_grad_norm": math.inf}
    return Update(adam, given if amsgrad else tensors, flags, one_step(step), options, role_of=roles, check=check)


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


def fused_ema_adamw(
    grad: Sequence[Tensor], var: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor], s: Sequence[Tensor],
    step: Tensor | int, lr: float, ema_decay: float, beta1: float, beta2: float, eps: float, mode: int,
    bias_correction: bool, weight_decay: float,
) -> None:  # fmt: skip
    """MindSpeed's EMA-Adam for lists of tensors: :func:`npu_apply_fused_ema_adamw` for each of them, in one launch.

    Args:
        grad, var, m, v, s: lists of the same length; the tensors may have any of our dtypes, each its own
        step, lr, ema_decay, beta1, beta2, eps, mode: as for :func:`npu_apply_fused_ema_adamw`
        bias_correction, weight_decay: as for :func:`npu_apply_fused_ema_adamw`

    Example:
        >>> grad, var, m, v, s = ([torch.full((2,), value)] for value in (1.0, 1.0, 0.0, 0.0, 1.0))
        >>> fused_ema_adamw(grad, var, m, v, s, torch.tensor([1]), 0.5, 0.5, 0.9, 0.999, 1e-8, 1, True, 0.0)
        >>> s
        [tensor([0.7500, 0.7500])]
    """
    lists = {"grad": grad, "var": var, "m": m, "v": v, "s": s}
    for name, given in lists.items():
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{name} is a {type(given).__name__}; it must be a list of tensors")
    flags, options = ema_choices(lr, ema_decay, beta1, beta2, eps, mode, bias_correction, weight_decay)
    Update(ema_adam, lists, flags, one_step(step), options, role_of=dict(zip(lists, EMA_ROLES, strict=True))).run()


def ema_update(
    tensors: Mapping[str, Any], step: Any, lr: float, ema_decay: float, beta1: float, beta2: float, eps: float,
    mode: int, bias_correction: bool, weight_decay: float,
) -> Update:  # fmt: skip
    """The step, checked and ready to run. ``tensors``: in the order of EMA_ROLES, under the caller's names."""
    flags, options = ema_choices(lr, ema_decay, beta1, beta2, eps, mode, bias_correction, weight_decay)
    roles = dict(zip(tensors, EMA_ROLES, strict=True))
    _, var, *_ = tensors

    def check() -> None:
        check_dtypes(tensors, var, [name for name in tensors if name != var])

    return Update(ema_adam, tensors, flags, one_step(step), options, role_of=roles, check=check)


def check_dtypes(tensors: Mapping[str, Any], var: str, as_var: Sequence[str]) -> None:
    for name, value in tensors.items():
        checks.tensor(name, value, DTYPES)
    for name in as_var:
        if tensors[name].dtype != tensors[var].dtype:
            have, want = names([tensors[name].dtype]), names([tensors[var].dtype])
            raise RuntimeError(f"{name} has dtype {have}, but {var} has {want}; they must be equal")


def one_step(step: Any) -> Any:
    if isinstance(step, (list, tuple)):
        raise TypeError(f"step is a {type(step).__name__}; it must be an int64 tensor of one element, or an int")
    if isinstance(step, Tensor) and (step.dtype != torch.int64 or step.shape not in ((1,), ())):
        raise TypeError(
            f"step is a tensor of shape {tuple(step.shape)} and {names([step.dtype])}; it must be int64, of shape (1,)"
        )
    return step


def _float32(name: str, value: Any, is_beta: bool) -> float:
    number = checks.number(name, value, below=1.0 if is_beta else math.inf)
    with np.errstate(over="ignore"):
        rounded = float(np.float32(number))
    if rounded > number and rounded == (1.0 if is_beta else math.inf):
        raise ValueError(f"{name}={value!r} becomes {rounded} in float32, which this operator uses; it must be smaller")
    return rounded
