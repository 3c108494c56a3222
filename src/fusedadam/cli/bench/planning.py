"""What is measured on a machine: which sets of parameters, how large, and which sizes for the curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fusedadam.cli.bench.measuring import Conditions, room
from fusedadam.cli.bench.results import Set
from fusedadam.cli.bench.shapes import Shape, parameters, shrunk

BYTES_EACH = 28  # that AdamW moves in float32, to guess times
DIVISORS = (1, 2, 4, 8, 16, 32)
FEWEST_AT_ONCE = 2
ELEMENTS_IN_EACH = 1024


@dataclass(frozen=True)
class Sized:
    described: Set
    shapes: list[Shape]


def sized(
    name: str, shapes: Sequence[Shape], dtype: str, wanted: int | None, longest_ms: float, machine: dict[str, Any],
    conditions: Conditions,
) -> Sized:  # fmt: skip
    """The set as large as fits into memory and, at the speed of a copy, into ``longest_ms``; or as ``wanted``."""
    for divisor in DIVISORS if wanted is None else (wanted,):
        smaller = shrunk(shapes, divisor) if divisor > 1 else list(shapes)
        count = parameters(smaller)
        fits = room(count, dtype, conditions) >= FEWEST_AT_ONCE
        if fits and ideal_ms(count, machine) <= longest_ms:
            break
    return Sized(Set(name, len(smaller), count, divisor), smaller)


def ideal_ms(count: int, machine: dict[str, Any]) -> float:
    return float(BYTES_EACH * count / machine["copy_gb_s"] / 1e6)


def growing_size(points: int, longest_ms: float, machine: dict[str, Any]) -> dict[int, list[Shape]]:
    """One tensor, from 4,096 elements on, each four times as large or more."""
    last = 14
    while ideal_ms(2 ** (last + 2), machine) <= longest_ms:
        last += 2
    exponents = sorted({round(12 + k * (last - 12) / (points - 1)) for k in range(points)})
    return {2**e: [(2**e,)] for e in exponents}


def growing_count(points: int) -> dict[int, list[Shape]]:
    """1 to 1,024 tensors of a fixed small size."""
    exponents = sorted({round(10 * k / (points - 1)) for k in range(points)})
    return {2**e: [(ELEMENTS_IN_EACH,)] * 2**e for e in exponents}
