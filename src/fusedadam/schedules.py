"""BertAdam's learning-rate schedules: factors as functions of ``x``, the fraction of all steps that has been taken.

Each rises linearly from 0 to 1 while ``x < warmup`` (no warm-up: ``warmup`` 0 or -1), and keeps its final value from
``x = 1`` on. ``x`` may be a number, an array or a tensor on any device, so there is no ``if`` in them.

Example:
    >>> [round(warmup_linear(k / 10, warmup=0.2), 3) for k in (0, 1, 2, 6, 10, 12)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from fusedadam.rules.ops import cos, divide, maximum, minimum, sqrt, where

Schedule: TypeAlias = Literal["warmup_cosine", "warmup_constant", "warmup_linear", "warmup_poly"]

__all__ = ["SCHEDULES", "warmup_constant", "warmup_cosine", "warmup_linear", "warmup_poly"]


def warmup_cosine(x: Any, warmup: float = -1) -> Any:
    """0.5 (1 + cos(pi x)): after the warm-up, follows the cosine down to 0."""
    return _warmed_up(x, warmup, 0.5 * (1 + cos(math.pi * minimum(x, 1.0))))


def warmup_constant(x: Any, warmup: float = -1) -> Any:
    """1 after the warm-up."""
    return _warmed_up(x, warmup, 1.0)


def warmup_linear(x: Any, warmup: float = -1) -> Any:
    """(1 - x) / (1 - warmup): after the warm-up, decreases linearly from 1 to 0."""
    return _warmed_up(x, warmup, maximum(divide(x - 1, maximum(warmup, 0.0) - 1), 0.0))


def warmup_poly(x: Any, warmup: float = -1) -> Any:
    """sqrt(1 - x): after the warm-up, decreases slowly at first, then steeply to 0."""
    return _warmed_up(x, warmup, sqrt(maximum(1 - x, 0.0)))


SCHEDULES: dict[str, Callable[..., Any]] = {
    schedule.__name__: schedule for schedule in (warmup_cosine, warmup_constant, warmup_linear, warmup_poly)
}
"""BertAdam's schedules by name."""


def _warmed_up(x: Any, warmup: float, later: Any) -> Any:
    """The factor during the warm-up, then ``later``."""
    warmup = maximum(warmup, 0.0)
    return where(x < warmup, divide(minimum(x, warmup), where(warmup > 0, warmup, 1.0)), later)
