"""The ops that IEEE rounds correctly, for numbers, numpy arrays, torch tensors and traced scalars."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusedadam.rules.tracing import Traced


def _for_scalars(op: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an op take traced scalars as well."""

    @functools.wraps(op)
    def call(*values: Any) -> Any:
        for value in values:
            if type(value) is Traced:
                return Traced.chosen(*values) if op.__name__ == "where" else Traced.of(op.__name__, values)
        return op(*values)

    return call


@_for_scalars
def sqrt(x: Any) -> Any:
    """The square root, correctly rounded."""
    if type(x) is float and x >= 0:
        return math.sqrt(x)  # as numpy's, but faster
    if not isinstance(x, torch.Tensor):
        return np.sqrt(x)
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.as_tensor(np.sqrt(x.detach().numpy()))  # torch's own may be off by an ulp on a CPU
    return torch.sqrt(x)


@_for_scalars
def abs(x: Any) -> Any:  # noqa: A001  rules read like the paper
    """The absolute value."""
    if type(x) is float:
        return math.fabs(x)
    return torch.abs(x) if isinstance(x, torch.Tensor) else np.abs(x)


@_for_scalars
def maximum(a: Any, b: Any) -> Any:
    """The larger of the two; NaN if either is NaN."""
    return _both(torch.maximum, np.maximum, a, b)


@_for_scalars
def minimum(a: Any, b: Any) -> Any:
    """The smaller of the two; NaN if either is NaN."""
    return _both(torch.minimum, np.minimum, a, b)


@_for_scalars
def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``, element by element. Both are computed: the other one may be NaN.

    A condition is a comparison, or several joined by ``&`` and ``|``, each in parentheses.
    """
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, *_tensors(condition, a, b))
    if type(condition) is not bool and np.ndim(condition):
        return np.where(condition, a, b)
    chosen = a if condition else b
    return chosen.item() if isinstance(chosen, np.generic) else chosen


@_for_scalars
def divide(a: Any, b: Any) -> Any:
    """a / b, correctly rounded; in scalars only, where it is the same as ``/``."""
    # torch itself multiplies by the reciprocal if one side is a number
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        a, b = _tensors(a if isinstance(a, torch.Tensor) else b, a, b)
    return a / b


def _both(for_torch: Callable[..., Any], for_numpy: Callable[..., Any], a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return for_torch(*_tensors(a if isinstance(a, torch.Tensor) else b, a, b))
    return for_numpy(a, b)


def _tensors(like: torch.Tensor, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors on the device of ``like``. Numbers become tensors there, without a copy from the host; their
    dtype is that of the other side if it is a tensor, else float64."""
    dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.float64)
    made = (x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype, device=like.device) for x in (a, b))
    return next(made), next(made)
