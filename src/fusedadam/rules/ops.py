"""The ops: functions that rules and scalars may call, and what each of them means.

A rule is written with these functions and with ``+ - * /``. The functions in this module work on torch tensors (for the
eager backend) and on numbers (for scalars). The Numba and Triton backends have functions of the same names that give
the same bits:

- division and ``sqrt`` are rounded correctly (IEEE), never approximated;
- nothing is contracted: ``a * b + c`` rounds twice on every backend;
- NaN propagates: ``maximum`` and ``minimum`` give NaN if either side is NaN;
- ``where(condition, a, b)`` is the elementwise choice; ``if`` is for flags alone;
- ``sign(x)`` and ``clamp(x, low, high)`` are made of these;
- ``power(x, y)``, for x >= 0, is computed in float64 and rounded. It is the only op that may differ by an ulp between
  backends; in scalars it does not (``portable.py``).

Sums combine elements: ``row_sum(x)`` adds all values of each row (an index of dimension 0), ``tensor_sum(x)`` all
values of the parameter, ``group_sum(x)`` all values of the parameters in its group with gradients of its dtype, and
``total(x)`` all values of all parameters. ``largest(x)``, for x >= 0, is the largest value of all parameters. The order
in which they are added is defined in ``sums.py``. The functions in this module know one parameter only.

``orthogonalized(x)`` is computed by products of matrices: see ``newton_schulz.py``.

``cos``, ``exp``, ``log`` and ``divide``, which is another way to write ``/``, are for scalars only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedadam.rules.arithmetic import abs, divide, maximum, minimum, sqrt, where  # noqa: A004
from fusedadam.rules.newton_schulz import DEFAULT
from fusedadam.rules.orthogonal import orthogonalize
from fusedadam.rules.portable import cos, exp, log, power
from fusedadam.tensors.matrices import matrices_of

__all__ = ["abs", "clamp", "cos", "divide", "exp", "log", "maximum", "minimum", "power", "sign", "sqrt", "where"]
__all__ += ["group_sum", "largest", "orthogonalized", "row_sum", "sum_last", "sum_second_last", "tensor_sum", "total"]


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


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """The matrix x with the same singular vectors, and singular values near 1, by Newton-Schulz iterations. Three
    dimensions are a stack of matrices; of more, each index of the first is a row. Once in a rule, under ``if matrix:``
    where parameters may also be vectors."""
    result = x.reshape(matrices_of(x.shape)).clone()
    orthogonalize(result, DEFAULT)
    return result.reshape(x.shape)


# the ops that every backend has, functions made of them, and the sums, with what they add up over
OPS: dict[str, Callable[..., Any]] = {op.__name__: op for op in (abs, maximum, minimum, power, sqrt, where)}
COMPOSED: dict[str, Callable[..., Any]] = {op.__name__: op for op in (clamp, sign)}
SUMS: dict[Callable[..., Any], str] = {
    row_sum: "row", sum_last: "row", sum_second_last: "column", tensor_sum: "tensor", group_sum: "group", total: "all",
    largest: "all",
}  # fmt: skip
FACTORED = (sum_last, sum_second_last)  # rows are then indices of all dimensions but the last, not of the first alone
