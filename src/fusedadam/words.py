"""The words that rules and scalars may use, and what each of them means.

A rule is written with these functions and with ``+ - * /``. Called as they stand here they work on torch tensors (the
eager backend) and on numbers (scalars). The Numba and Triton backends bind functions of the same names, with the
same meaning to the bit:

- division and ``sqrt`` are rounded correctly (IEEE), never approximated;
- nothing is contracted: ``a * b + c`` rounds twice on every backend;
- NaN is contagious: ``maximum`` and ``minimum`` give NaN if either side is NaN;
- ``where(condition, a, b)`` is the elementwise choice; ``if`` is for flags alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["abs", "maximum", "minimum", "sqrt", "where"]


def sqrt(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return np.sqrt(x)
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.as_tensor(np.sqrt(x.detach().numpy()))  # torch's own may be off by an ulp on a CPU
    return torch.sqrt(x)


def abs(x: Any) -> Any:  # noqa: A001  the word is the field's own
    return torch.abs(x) if isinstance(x, torch.Tensor) else np.abs(x)


def maximum(a: Any, b: Any) -> Any:
    return _both(torch.maximum, np.maximum, a, b)


def minimum(a: Any, b: Any) -> Any:
    return _both(torch.minimum, np.minimum, a, b)


def where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, a, b)
    return np.where(condition, a, b)


def _both(for_torch: Callable[..., Any], for_numpy: Callable[..., Any], a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return for_torch(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))
    if isinstance(b, torch.Tensor):
        return for_torch(torch.as_tensor(a, dtype=b.dtype, device=b.device), b)
    return for_numpy(a, b)


WORDS: dict[str, Callable[..., Any]] = {name: globals()[name] for name in __all__}
