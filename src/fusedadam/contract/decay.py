"""Weight decay that follows the schedule of the learning rate, but not its size: the option ``peak_lr``.

Decoupled weight decay multiplies weights by 1 - lr * weight_decay, so that a larger learning rate also decays faster.
With ``peak_lr`` the factor is 1 - (lr / peak_lr) * weight_decay: lr / peak_lr is the schedule multiplier of Loshchilov
and Hutter's paper (Algorithm 2). It is computed here alone: a rule is given weight_decay / peak_lr as its weight decay,
and its scalars and kernels stay as they are.

The name ``max_lr`` would collide: torch's OneCycleLR writes a ``max_lr`` of its own into the groups.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fusedadam import checks
from fusedadam.contract.declarations import Check, Derive, Group

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer


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
