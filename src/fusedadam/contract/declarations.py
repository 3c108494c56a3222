"""What an optimizer declares about itself: its states, its options, and how the rule's arguments follow from them.

    class Lion(FusedOptimizer):
        rule = lion
        states = {"exp_avg": State()}
        options = OPTIONS | {"betas": checks.betas}

        def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, **common):
            super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, **common)

docs/rules.md has all of it. The signature of ``__init__`` gives the defaults; those that our optimizers share are in
common_options.py. ``options`` maps the name of each option to its check, which runs when the optimizer is made and
whenever the option changes. A flag or hyper-parameter of the rule is the option of the same name, unless ``derived``
computes it from the group, or ``fixed`` gives it the same value in every group. ``DERIVED`` splits ``betas``, and turns
``max_grad_norm`` into the flag ``clipped`` and ``momentum`` into ``with_momentum``; a class with more to derive
declares ``derived = DERIVED | {...}``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from fusedadam import backends, checks
from fusedadam.tensors.complex_numbers import part_dtype
from fusedadam.tensors.factored import shape_in, with_local_in
from fusedadam.tensors.shards import local, local_shape, with_local

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer

Group: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[str, Any], object]  # name, value; raises if the option cannot have this value
Derive: TypeAlias = Callable[[Group], Any]
Backend: TypeAlias = Literal["numba", "triton", "eager"]


INITIAL = ("zero", "one", "param")


@dataclass(frozen=True)
class State:
    """A tensor that an optimizer keeps for each parameter.

    ``initial``: zeros, ones, or a copy of the parameter. ``dtype_option``: the option that names its dtype; None there
    means the parameter's own, which states of complex parameters always have. ``by``: what it has a value for, an
    element, a row, a column or the tensor; the rule's signature says so, and a class takes it from there.

    What it may be kept in (``storage=``) follows from the others. ``signed``: False for values that are never negative,
    such as second moments. ``decay``: for a moving average, the hyper-parameter of the rule that says how much of it is
    kept in a step. ``maximum_of``: the state whose running maximum it is. ``subtracted_from``: the state that the rule
    subtracts it, or its square, from; or ``"grad"``.
    """

    initial: Literal["zero", "one", "param"] = "zero"
    signed: bool = True
    by: str = "element"
    dtype_option: str = "state_dtype"
    decay: str | None = None
    maximum_of: str | None = None
    subtracted_from: str | None = None

    def __post_init__(self) -> None:
        if self.initial not in INITIAL:
            raise ValueError(f"initial={self.initial!r} is unknown; use one of {', '.join(map(repr, INITIAL))}")

    def new(self, param: Tensor, group: Group) -> Tensor:
        """The state of a parameter before its first step."""
        here = local(param).detach()
        if self.by != "element":
            shape = shape_in(self.by, local_shape(param))
            empty = torch.empty(shape, dtype=self.dtype_of(here, group), device=here.device)
        else:
            dtype = None if here.is_complex() else self.dtype_in(group)
            empty = torch.empty_like(here, dtype=dtype, requires_grad=False)
        if self.initial == "param":
            return with_local(param, empty.copy_(here))
        return with_local_in(self.by, param, empty.fill_(1.0 if self.initial == "one" else 0.0))

    def dtype_in(self, group: Group) -> torch.dtype | None:
        """The dtype that the option names, if it does."""
        return checks.named_dtype(group.get(self.dtype_option))  # type: ignore[no-any-return]

    def dtype_of(self, param: Tensor, group: Group) -> torch.dtype:
        """By tensor at least float32: it costs nothing."""
        dtype = self.dtype_in(group) or part_dtype(param.dtype)
        return torch.promote_types(dtype, torch.float32) if self.by == "tensor" else dtype


def clips(group: Group) -> bool:
    """Whether a group's gradients are clipped; 0 and None mean that they are not."""
    return group.get("max_grad_norm") is not None and float(group["max_grad_norm"]) != 0


def largest_norm(group: Group) -> Any:
    return math.inf if group.get("max_grad_norm") is None else group["max_grad_norm"]


def _backend(_: str, value: Any) -> None:
    if value is not None:
        backends.check(value)


OPTIONS: dict[str, Check] = {
    "lr": checks.number,
    "weight_decay": checks.number,
    "max_grad_norm": checks.max_grad_norm,
    "maximize": checks.boolean,
    "capturable": checks.boolean,
    "differentiable": checks.not_differentiable,
    "foreach": functools.partial(checks.boolean, or_none=True),
    "fused": functools.partial(checks.boolean, or_none=True),
    "state_dtype": checks.storage_dtype,
    "backend": _backend,
    "storage": lambda name, value: None,  # checked with the states that it is for: storage.py
    "offload": checks.boolean,
    "seed": checks.seed,
    "skip_nonfinite": checks.boolean,
}
"""The options of every optimizer, and the check of each. A class adds its own:
``options = OPTIONS | {"betas": checks.betas}``. It may leave some of them out of its signature."""

DERIVED: dict[str, Derive] = {
    "beta1": lambda group: group["betas"][0],
    "beta2": lambda group: group["betas"][1],
    "beta3": lambda group: group["betas"][2],
    "maximize": lambda group: group.get("maximize", False),
    "cautious": lambda group: group.get("cautious", False),
    "update_clipping": lambda group: group.get("update_clipping", False),
    "clipped": clips,
    "with_momentum": lambda group: float(group["momentum"]) != 0,
    "max_grad_norm": largest_norm,
}
"""The flags and hyper-parameters that follow from options, and the function that computes each. A class adds its own:
``derived = DERIVED | {"cosine": lambda group: group["schedule"] == "cosine"}``."""


# Weight decay that follows the schedule of the learning rate, but not its size: the option ``peak_lr``.
#
# Decoupled weight decay multiplies weights by 1 - lr * weight_decay, so that a larger learning rate also decays faster.
# With ``peak_lr`` the factor is 1 - (lr / peak_lr) * weight_decay: lr / peak_lr is the schedule multiplier of
# Loshchilov and Hutter's paper (Algorithm 2). It is computed here alone: a rule is given weight_decay / peak_lr as its
# weight decay, and its scalars and kernels stay as they are.
#
# The name ``max_lr`` would collide: torch's OneCycleLR writes a ``max_lr`` of its own into the groups.


def _peak_lr(name: str, value: Any) -> None:
    if value is not None and not 0 < checks.real(name, value) < math.inf:
        raise ValueError(
            f"{name}={value!r} is out of range; it must be above 0 and finite, or None for weight decay in proportion "
            "to lr"
        )


def _relative_to_lr(group: Group) -> Any:
    """The weight decay that a rule multiplies by the learning rate."""
    weight_decay, peak_lr = group["weight_decay"], group.get("peak_lr")
    if peak_lr is None:
        return weight_decay
    if isinstance(weight_decay, Tensor) and weight_decay.device.type != "cpu":
        raise ValueError(
            f"peak_lr={peak_lr!r} divides weight_decay on the host, and that is a tensor on {weight_decay.device}; "
            "pass weight_decay as a number, or leave peak_lr out"
        )
    if (relative := float(weight_decay) / float(peak_lr)) == math.inf:  # which a learning rate of 0 would make NaN
        raise ValueError(
            f"peak_lr={peak_lr!r} is too small: weight_decay={weight_decay!r} divided by it is infinite; it must be "
            "the largest learning rate of the schedule"
        )
    return relative


# what a class with decoupled weight decay adds to its ``options`` and to its ``derived``
PEAK_LR: dict[str, Check] = {"peak_lr": _peak_lr}
RELATIVE_TO_LR: dict[str, Derive] = {"weight_decay": _relative_to_lr}


def check_is_decoupled(cls: type[FusedOptimizer], group: Group) -> None:
    """For optimizers whose weight decay may also be an L2 penalty."""
    if "peak_lr" not in cls.options or "decoupled" not in cls.rule.flags:
        return
    if group.get("peak_lr") is not None and not cls.value(group, "decoupled"):
        raise ValueError(
            f"peak_lr={group['peak_lr']!r} is for decoupled weight decay, and this group's is an L2 penalty; leave "
            "peak_lr out, or decouple the weight decay"
        )


def is_on_device(value: Any) -> bool:
    """Whether an option is a number that only a device knows."""
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and value.numel() == 1


def names_on_device(group: Group) -> list[str]:
    """The options with a value on a device, which the host does not know."""

    def has_any(value: Any) -> bool:
        return any(map(has_any, value)) if isinstance(value, (list, tuple)) else is_on_device(value)

    return [name for name, value in group.items() if name != "params" and has_any(value)]
