"""Checks of options and arguments: ``check(name, value)``, which an optimizer's ``options`` map each name to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fusedadam.formats import FORMAT_OF_DTYPE, names


def number(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> float:
    """A finite number in [low, below); a tensor of one element counts as one."""
    number = real(name, value)
    if not low <= number < below:
        allowed = f"at least {low:g} and finite" if below == math.inf else f"in [{low:g}, {below:g})"
        raise ValueError(f"{name}={value!r} is out of range; it must be {allowed}")
    return number


def finite(name: str, value: Any) -> float:
    """A finite number of either sign."""
    if not math.isfinite(number := real(name, value)):
        raise ValueError(f"{name}={value!r} is out of range; it must be finite")
    return number


def not_positive(name: str, value: Any) -> None:
    if not finite(name, value) <= 0:
        raise ValueError(f"{name}={value!r} is out of range; it must be at most 0")


def at_least_one(name: str, value: Any) -> None:
    number(name, value, low=1.0)


def first_may_be_none(name: str, value: Any) -> None:
    """Two numbers of at least 0, of which the first may be None."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(
            f"{name}={value!r} is a {type(value).__name__}; it must be a pair: None or a number, and a number"
        )
    if len(value) != 2:
        raise ValueError(f"{name}={value!r} has {len(value)} values; it must be a pair: None or a number, and a number")
    for k, part in enumerate(value):
        if k or part is not None:
            number(f"{name}[{k}]", part)


def real(name: str, value: Any) -> float:
    """Any number, as a float; an integer too large for float64 is infinite."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} is a tensor of shape {tuple(value.shape)}; a tensor {name} must have one element")
        if value.device.type == "meta":
            raise RuntimeError(f"{name} is a meta tensor and has no value; it must be on a device")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def one_number(name: str, value: Any) -> None:
    """A value that ``float`` accepts."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise RuntimeError(f"{name} has shape {tuple(value.shape)}; it must have one element")
    if not isinstance(value, (Tensor, int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a number or a tensor of one element")


def largest_norm(name: str, value: Any) -> float:
    """At least 0, or infinity, which never clips."""
    if not (norm := real(name, value)) >= 0:
        raise ValueError(f"{name}={value!r} is out of range; it must be at least 0, and may be infinite")
    return norm


def max_grad_norm(name: str, value: Any) -> None:
    if value is not None and not real(name, value) >= 0:
        raise ValueError(
            f"{name}={value!r} is out of range; it must be above 0 (inf computes the norm without clipping), or 0 or "
            "None for no clipping"
        )


def max_weight_norm(name: str, value: Any) -> None:
    if value is not None and not real(name, value) > 0:
        raise ValueError(f"{name}={value!r} is out of range; it must be above 0, or None for no limit")


def warmup_steps(name: str, value: Any) -> None:
    if value is not None and not 0 < real(name, value) < math.inf:
        raise ValueError(f"{name}={value!r} is out of range; it must be above 0, or None for no warmup")


def count(name: str, value: Any) -> None:
    """A number of steps."""
    if not (0 <= (steps := real(name, value)) < math.inf and steps == int(steps)):
        raise ValueError(f"{name}={value!r} is out of range; it must be a whole number, at least 0")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """One of the ``allowed`` strings; fix them with ``functools.partial(one_of, allowed=(...))``."""
    if value not in tuple(allowed):
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, allowed))}")


def fraction(name: str, value: Any) -> float:
    """A number from 0 to 1, both included."""
    if not 0 <= (part := real(name, value)) <= 1:
        raise ValueError(f"{name}={value!r} is out of range; it must be in [0, 1]")
    return part


def mode(value: Any) -> None:
    if type(value) is not int or value not in (0, 1):
        raise ValueError(f"mode={value!r} must be 0 (L2, as Adam) or 1 (decoupled weight decay, as AdamW)")


def betas(name: str, value: Any, count: int = 2) -> None:
    """A tuple of ``count`` numbers in [0, 1); for three, use ``functools.partial(betas, count=3)``."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be {count} numbers in [0, 1)")
    if len(value) != count:
        raise ValueError(f"{name}={value!r} must be {count} numbers in [0, 1)")
    for k, beta in enumerate(value):
        number(f"{name}[{k}]", beta, below=1.0)


def boolean(name: str, value: Any, or_none: bool = False) -> None:
    """True or False."""
    if not isinstance(value, bool) and not (or_none and value is None):
        raise TypeError(f"{name}={value!r} must be True or False{' or None' if or_none else ''}")


def seed(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; it must be an int")
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name}={value!r} is out of range; it must be at least 0 and below 2**64")


def storage_dtype(name: str, value: Any) -> None:
    value = named_dtype(value)
    if value is not None and not isinstance(value, torch.dtype):
        raise TypeError(f"{name}={value!r} must be a torch.dtype, its name, or None")
    if value is not None and value not in FORMAT_OF_DTYPE:
        raise ValueError(
            f"{name}={value} is not supported; use one of {names(FORMAT_OF_DTYPE)}, or None for the parameter's own"
        )


def named_dtype(value: Any) -> Any:
    """A dtype by its name, as a YAML file has it: "float32" or "torch.float32". Anything else stays as it is."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    return found if isinstance(found, torch.dtype) else value


def not_differentiable(name: str, value: Any) -> None:
    boolean(name, value)
    if value:
        raise RuntimeError(f"{name}=True is not supported: the step is fused and in place; use torch.optim")


def unsupported(name: str, value: Any, error: type[Exception] = ValueError) -> None:
    """An option that only other optimizers of the family have."""
    boolean(name, value)
    if value:
        raise error(f"{name}=True is not supported by this optimizer; leave {name} out")


def unless(allowed: Any, check: Callable[[str, Any], object]) -> Callable[[str, Any], object]:
    """A check that also allows one more value, such as -1 for "none"."""
    return lambda name, value: None if value == allowed else check(name, value)


def iterable_of_parameters(name: str, value: Any) -> None:
    """Parameters, checked without consuming an iterator."""
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        raise TypeError(f"{name} is a module ({kind}); pass its parameters: model.parameters()")
    if isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"{name} is an optimizer ({kind}); pass the parameters of the model: model.parameters()")
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is a {kind}; it must be parameters, such as model.parameters()")
