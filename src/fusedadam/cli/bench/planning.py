"""How large the sets of parameters are on this machine, and which sizes the curves have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedadam.cli.bench.report import Set
from fusedadam.cli.harness.measure import Conditions, room
from fusedadam.cli.harness.shapes import Shape, parameters, shrunk

BYTES_EACH = 28  # that AdamW moves in float32, to guess times
DIVISORS = (1, 2, 4, 8, 16, 32)
FEWEST_AT_ONCE = 2
ELEMENTS_IN_EACH = 1024
Sized = tuple[Set, list[Shape]]


def sized(
    name: str, shapes: Sequence[Shape], dtype: str, wanted: int | None, longest_ms: float, machine: dict[str, Any],
    conditions: Conditions,
) -> Sized:  # fmt: skip
    """Scales a set down by ``wanted``, or until it fits into memory and, at a copy's speed, into ``longest_ms``."""
    for divisor in DIVISORS if wanted is None else (wanted,):
        smaller = shrunk(shapes, divisor) if divisor > 1 else list(shapes)
        count = parameters(smaller)
        if room(count, dtype, conditions) >= FEWEST_AT_ONCE and _ideal_ms(count, machine) <= longest_ms:
            break
    return Set(name, len(smaller), count, divisor), smaller


def _ideal_ms(count: int, machine: dict[str, Any]) -> float:
    return float(BYTES_EACH * count / machine["copy_gb_s"] / 1e6)


def growing_size(points: int, longest_ms: float, machine: dict[str, Any]) -> dict[int, list[Shape]]:
    """One tensor, from 4,096 elements on, each at least four times as large."""
    last = 14
    while _ideal_ms(2 ** (last + 2), machine) <= longest_ms:
        last += 2
    exponents = sorted({round(12 + k * (last - 12) / (points - 1)) for k in range(points)})
    return {2**e: [(2**e,)] for e in exponents}


def growing_count(points: int) -> dict[int, list[Shape]]:
    """1 to 1,024 tensors of a fixed small size."""
    exponents = sorted({round(10 * k / (points - 1)) for k in range(points)})
    return {2**e: [(ELEMENTS_IN_EACH,)] * 2**e for e in exponents}
