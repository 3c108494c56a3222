"""How BertAdam's learning rate goes over a training: functions of ``x``, the part of all steps that is done.

Each rises from 0 to its height while ``x < warmup`` (none: ``warmup`` 0 or -1) and has reached its end at ``x = 1``,
where it stays. ``x`` may be a number, an array or a tensor on any device: they are made of words, not of ``if``.

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
    """0.5 (1 + cos(pi x)): a cosine from wherever the warm-up ends down to 0."""
    return _warmed_up(x, warmup, 0.5 * (1 + cos(math.pi * minimum(x, 1.0))))


def warmup_constant(x: Any, warmup: float = -1) -> Any:
    """1 for ever."""
    return _warmed_up(x, warmup, 1.0)


def warmup_linear(x: Any, warmup: float = -1) -> Any:
    """(1 - x) / (1 - warmup): a straight line from 1 at the end of the warm-up down to 0."""
    return _warmed_up(x, warmup, maximum(divide(x - 1, maximum(warmup, 0.0) - 1), 0.0))


def warmup_poly(x: Any, warmup: float = -1) -> Any:
    """sqrt(1 - x): slow at first, then steeply down to 0."""
    return _warmed_up(x, warmup, sqrt(maximum(1 - x, 0.0)))


SCHEDULES: dict[str, Callable[..., Any]] = {
    schedule.__name__: schedule for schedule in (warmup_cosine, warmup_constant, warmup_linear, warmup_poly)
}


def _warmed_up(x: Any, warmup: float, later: Any) -> Any:
    warmup = maximum(warmup, 0.0)
    return where(x < warmup, divide(minimum(x, warmup), where(warmup > 0, warmup, 1.0)), later)
