"""Step counts for scalars: ``beta ** step`` has the same bits on the host and on every device.

The power functions of C libraries and GPUs differ in the last bit. Results would differ as well when training resumes
on another machine, or when counts move to the device (GradScaler, capturable). Therefore a power is a product of four
factors, one for each digit of the step count, from a small table of powers of beta. The factors are computed with
integers and rounded once, and multiplication is correctly rounded everywhere. A new beta costs a few hundred products
of integers at most; schedulers that cycle the momentum bring one in every step.
"""

from __future__ import annotations

import functools
import math
from array import array
from typing import Any

import numpy as np

# The bit at which each digit of a step count begins, and how many values the digit has.
SHIFTS, SIZES = (0, 6, 12, 18), (64, 64, 64, 128)
LAST = (1 << 25) - 1  # later steps get the power of this one; counts in float32 end at 2**24
PRECISION = 128  # bits after the binary point
ONE = 1 << PRECISION
RECENT = 64  # how many betas the host keeps tables for


class Powers:
    """The powers of one number. ``factor(digit, d)`` is ``base ** (d << SHIFTS[digit])``, computed on first use.

    Attributes are replaced, never changed in place: another thread, or an interrupt, may come at any time.
    """

    def __init__(self, base: float) -> None:
        numerator, denominator = base.as_integer_ratio()
        self._bases = [numerator * ONE // denominator]  # base ** (1 << SHIFTS[digit]) for each digit, exactly
        self._factors = [(array("d", [1.0]), ONE)] * len(SIZES)  # the factors of each digit so far; the last, exactly
        self._upper = 0, 1.0  # the last two digits of the last number, and the product of their factors

    def factor(self, digit: int, d: int) -> float:
        factors, last = self._factors[digit]
        if len(factors) <= d:
            base, more = self._base(digit), array("d")
            for _ in range(len(factors), d + 1):
                last = last * base >> PRECISION
                more.append(math.ldexp(last, -PRECISION))
            factors = factors + more
            self._factors[digit] = factors, last
        return factors[d]

    def power(self, number: int) -> float:
        upper, product = self._upper
        if upper != number >> SHIFTS[2]:  # once in 4,096 steps
            upper = number >> SHIFTS[2]
            product = self.factor(2, upper & SIZES[2] - 1) * self.factor(3, upper >> SHIFTS[1])
            self._upper = upper, product
        return self.factor(0, number & SIZES[0] - 1) * self.factor(1, number >> SHIFTS[1] & SIZES[1] - 1) * product

    @functools.cached_property
    def table(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """All factors, digit by digit."""
        return np.array([self.factor(digit, d) for digit, size in enumerate(SIZES) for d in range(size)])

    def _base(self, digit: int) -> int:
        bases = self._bases
        while len(bases) <= digit:
            base = bases[-1]
            for _ in range(SHIFTS[1]):
                base = base * base >> PRECISION
            bases = [*bases, base]
        self._bases = bases
        return bases[digit]


recent_powers = functools.lru_cache(maxsize=RECENT)(Powers)


class Count(float):
    """A step count on the host."""

    def __rpow__(self, base: float, _: None = None) -> float:
        return recent_powers(float(base)).power(min(int(self), LAST))
