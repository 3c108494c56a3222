"""The ops: functions that rules and scalars may call, and what each of them means.

A rule is written with these functions and with ``+ - * /``. The functions in this module work on torch tensors (for the
eager backend) and on numbers (for scalars). The Numba and Triton backends have functions of the same names that give
the same bits:

- division and ``sqrt`` are rounded correctly (IEEE), never approximated;
- nothing is contracted: ``a * b + c`` rounds twice on every backend;
- NaN propagates: ``maximum`` and ``minimum`` give NaN if either side is NaN;
- ``where(condition, a, b)`` is the elementwise choice; ``if`` is for flags alone;
- ``sign(x)`` and ``clamp(x, low, high)`` are made of these;
- ``power(x, y)``, for x >= 0, is calculated in float64 and rounded: the only op that may differ by an ulp between
  backends.

Sums combine elements: ``row_sum(x)`` adds all values of each row (an index of dimension 0), ``tensor_sum(x)`` all
values of the parameter, ``group_sum(x)`` all values of the parameters in its group with gradients of its dtype, and
``total(x)`` all values of all parameters. ``largest(x)``, for x >= 0, is the largest value of all parameters. The order
in which they are added is defined in ``sums.py``. The functions in this module know one parameter only.

``cos`` and ``divide`` are for scalars only: in a rule, division is ``/``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusedadam.rules.tracing import OnDevice, Traced

__all__ = [
    "abs",
    "clamp",
    "cos",
    "divide",
    "group_sum",
    "largest",
    "maximum",
    "minimum",
    "power",
    "row_sum",
    "sign",
    "sqrt",
    "tensor_sum",
    "total",
    "where",
]


def _for_scalars(op: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an op take step counts on a device, and traced scalars, as well."""

    @functools.wraps(op)
    def call(*values: Any) -> Any:
        for value in values:
            if not isinstance(value, float):  # as nearly all are, in every step
                return special(values)
        return op(*values)

    def special(values: tuple[Any, ...]) -> Any:
        if any(type(value) is Traced for value in values):
            return Traced.chosen(*values) if op.__name__ == "where" else Traced.of(op.__name__, values)
        return op(*(value.numbers if isinstance(value, OnDevice) else value for value in values))

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
    if np.ndim(condition):
        return np.where(condition, a, b)
    chosen = a if condition else b
    return chosen.item() if isinstance(chosen, np.generic) else chosen


@_for_scalars
def power(x: Any, y: Any) -> Any:
    """x to the power of y, for x >= 0, computed in float64; it may differ by an ulp between backends."""
    if isinstance(x, torch.Tensor):
        return torch.pow(x.double(), y).to(x.dtype)
    return np.power(x, y)


@_for_scalars
def divide(a: Any, b: Any) -> Any:
    """a / b, correctly rounded; in scalars only, since a rule divides with ``/``."""
    # torch itself multiplies by the reciprocal if one side is a number
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        a, b = _tensors(a if isinstance(a, torch.Tensor) else b, a, b)
    return a / b


@_for_scalars
def cos(x: Any) -> Any:
    """The cosine; in scalars only. Devices round it differently."""
    return torch.cos(x) if isinstance(x, torch.Tensor) else np.cos(x)


# made of others: a backend compiles them like the helper functions of a rule


def sign(x: Any) -> Any:
    """1 or -1; x itself where it is 0 or NaN."""
    return where(x > 0, 1.0, where(x < 0, -1.0, x))


def clamp(x: Any, low: Any, high: Any) -> Any:
    """x, but at least ``low`` and at most ``high``; NaN stays NaN."""
    return minimum(maximum(x, low), high)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over each row, which is an index of dimension 0."""
    return x.sum(dim=tuple(range(1, x.dim())), keepdim=True) if x.dim() > 1 else x


def sum_last(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension: one value for each row of a matrix, as a ``RowValue`` has."""
    return x.sum(dim=-1, keepdim=True)


def sum_second_last(x: torch.Tensor) -> torch.Tensor:
    """The sum over the second-to-last dimension: one value for each column of a matrix, as a ``ColumnValue`` has. Of a
    value by row, it is the sum over the rows of each matrix."""
    return x.sum(dim=-2, keepdim=True)


def tensor_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the whole parameter."""
    return x.sum()


def group_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the parameters of the group whose gradients have the same dtype."""
    return x.sum()


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over all parameters."""
    return x.sum()


def largest(x: torch.Tensor) -> torch.Tensor:
    """The largest value of all parameters, for x >= 0."""
    return x.amax() if x.numel() else x.new_zeros(())


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


# the ops that every backend has, functions made of them, and the sums, with what they add up over
OPS: dict[str, Callable[..., Any]] = {op.__name__: op for op in (abs, maximum, minimum, power, sqrt, where)}
COMPOSED: dict[str, Callable[..., Any]] = {op.__name__: op for op in (clamp, sign)}
SUMS: dict[Callable[..., Any], str] = {
    row_sum: "row", sum_last: "row", sum_second_last: "column", tensor_sum: "tensor", group_sum: "group", total: "all",
    largest: "all",
}  # fmt: skip
FACTORED = (sum_last, sum_second_last)  # rows are then indices of all dimensions but the last, not of the first alone
