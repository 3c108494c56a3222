"""The words that rules and scalars may use, and what each of them means.

A rule is written with these functions and with ``+ - * /``. Called as they stand here they work on torch tensors (the
eager backend) and on numbers (scalars). The Numba and Triton backends bind functions of the same names, with the
same meaning to the bit:

- division and ``sqrt`` are rounded correctly (IEEE), never approximated;
- nothing is contracted: ``a * b + c`` rounds twice on every backend;
- NaN is contagious: ``maximum`` and ``minimum`` give NaN if either side is NaN;
- ``where(condition, a, b)`` is the elementwise choice; ``if`` is for flags alone;
- ``power(x, y)``, for x >= 0, is calculated in float64 and rounded: the one word that may differ by an ulp between
  backends.

Sums look beyond the element: ``row_sum(x)`` adds the values of each row (an index of dimension 0), ``tensor_sum(x)``
those of the parameter, ``group_sum(x)`` those of all parameters of its group that have gradients of its dtype,
``total(x)`` those of all parameters; ``largest(x)``, for x >= 0, is the largest value of all. ``sums.py`` says in
which order they are added. Called as they stand here, they know one parameter only. ``cos`` and ``divide`` are
for scalars alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fusedadam.rules.tracing import OnDevice, Traced

__all__ = [
    "abs",
    "cos",
    "divide",
    "group_sum",
    "largest",
    "maximum",
    "minimum",
    "power",
    "row_sum",
    "sqrt",
    "tensor_sum",
    "total",
]
__all__ += ["where"]


def _of_scalars(word: Callable[..., Any]) -> Callable[..., Any]:
    """The word, also for what scalars are made of: counts on a device, and values that are not known yet."""

    @functools.wraps(word)
    def call(*values: Any) -> Any:
        if any(type(value) is Traced for value in values):
            return Traced.chosen(*values) if word.__name__ == "where" else Traced.of(values)
        return word(*(value.numbers if isinstance(value, OnDevice) else value for value in values))

    return call


@_of_scalars
def sqrt(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return np.sqrt(x)
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.as_tensor(np.sqrt(x.detach().numpy()))  # torch's own may be off by an ulp on a CPU
    return torch.sqrt(x)


@_of_scalars
def abs(x: Any) -> Any:  # noqa: A001  the word is the field's own
    return torch.abs(x) if isinstance(x, torch.Tensor) else np.abs(x)


@_of_scalars
def maximum(a: Any, b: Any) -> Any:
    return _both(torch.maximum, np.maximum, a, b)


@_of_scalars
def minimum(a: Any, b: Any) -> Any:
    return _both(torch.minimum, np.minimum, a, b)


@_of_scalars
def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, *_tensors(condition, a, b))
    if np.ndim(condition):
        return np.where(condition, a, b)
    chosen = a if condition else b
    return chosen.item() if isinstance(chosen, np.generic) else chosen


@_of_scalars
def power(x: Any, y: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.pow(x.double(), y).to(x.dtype)
    return np.power(x, y)


@_of_scalars
def divide(a: Any, b: Any) -> Any:
    """a / b, correctly rounded. For scalars: where one side is a number, torch multiplies by a reciprocal instead."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        a, b = _tensors(a if isinstance(a, torch.Tensor) else b, a, b)
    return a / b


@_of_scalars
def cos(x: Any) -> Any:
    return torch.cos(x) if isinstance(x, torch.Tensor) else np.cos(x)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=tuple(range(1, x.dim())), keepdim=True) if x.dim() > 1 else x


def tensor_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def group_sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax() if x.numel() else x.new_zeros(())


def _both(for_torch: Callable[..., Any], for_numpy: Callable[..., Any], a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return for_torch(*_tensors(a if isinstance(a, torch.Tensor) else b, a, b))
    return for_numpy(a, b)


def _tensors(like: torch.Tensor, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors on the device, of the dtype of that which is one, else float64; made there, not sent there."""
    dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.float64)
    made = (x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype, device=like.device) for x in (a, b))
    return next(made), next(made)


# what kernels know, and what is summed over what
OPS: dict[str, Callable[..., Any]] = {word.__name__: word for word in (abs, maximum, minimum, power, sqrt, where)}
SUMS: dict[Callable[..., Any], str] = {
    row_sum: "row", tensor_sum: "tensor", group_sum: "group", total: "all", largest: "all"
}  # fmt: skip
