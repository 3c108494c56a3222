"""exp, log, power and cos with the same bits on every processor and device.

C libraries, numpy (which has other routines for AVX-512), torch and CUDA round these functions differently in the last
bit. Here they are made of ``+ - *``, division and comparisons in float64, which IEEE rounds alike everywhere as long as
nothing is contracted. So they work on anything that scalars may be: numbers of the host, tensors, and traced scalars,
which become operations of a kernel.

log is within one ulp of the exact result, exp and power within two, and cos within four up to 1e6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fusedadam.rules.arithmetic import abs, divide, where  # noqa: A004

INFINITY, NAN = math.inf, math.nan
# The first part of each constant has so few bits that its product with an integer below 2**20 is exact.
LN2 = 0.6931471803691238, 1.9082149292705877e-10
HALF_PI = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21
SQRT2, ONE_OVER_LN2, TWO_OVER_PI = 1.4142135623730951, 1.4426950408889634, 0.6366197723675814
ROUNDS = 1.5 * 2.0**52  # added and subtracted again, it leaves the nearest integer
SPLITS = 2.0**27 + 1  # divides a float64 into two halves (Veltkamp)
LARGEST_SHIFT = 1000.0  # 2**n and 2**-n are normal
BITS = [2.0**k for k in range(9, -1, -1)]

ATANH = [2 / k for k in range(3, 24, 2)]  # 2 atanh(s) = 2 s + s**3 (2/3 + 2/5 s**2 + ...)
EXP = [1 / math.factorial(k) for k in range(14)]
COS = [(-1) ** k / math.factorial(2 * k) for k in range(10)]
SIN = [(-1) ** k / math.factorial(2 * k + 1) for k in range(10)]


def _in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors of any dtype keep it: less than float64 would not survive ROUNDS and SPLITS."""

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        for value in values:
            if isinstance(value, torch.Tensor) and value.dtype != torch.float64:
                return function(*map(_number, values)).to(value.dtype)
        return function(*values)

    return call


@_in_float64
def exp(x: Any) -> Any:
    """e to the power of x; in scalars only."""
    return _exp(_number(x), 0.0)


@_in_float64
def log(x: Any) -> Any:
    """The natural logarithm; in scalars only. NaN for x < 0."""
    x = _number(x)
    high, low = _log(x)
    return where(x > 0.0, where(x < INFINITY, high + low, INFINITY), where(x == 0.0, -INFINITY, NAN))


@_in_float64
def power(x: Any, y: Any) -> Any:
    """x to the power of y, for x >= 0, computed in float64.

    In scalars it has the same bits everywhere. In a rule, Numba and Triton use their own routines, which may differ by
    an ulp.
    """
    x, y = _number(x), _number(y)
    high, low = _log(x)
    product = y * high
    rest = _product_error(y, high, product) + y * low
    # beyond 1000 the result is 0 or infinite, and the rest may be NaN
    result = _exp(product, where(abs(product) < 1000.0, rest, 0.0))
    result = where(x > 0.0, result, where(x == 0.0, where(y > 0.0, 0.0, INFINITY), NAN))
    result = where(x == INFINITY, where(y > 0.0, INFINITY, 0.0), result)
    return where(y == 0.0, 1.0, where(x == 1.0, 1.0, where(y == y, result, NAN)))


@_in_float64
def cos(x: Any) -> Any:
    """The cosine, for x up to 1e6; in scalars only."""
    x = _number(x)
    quarters = _nearest(x * TWO_OVER_PI)
    turned = quarters - 4.0 * _nearest(quarters * 0.25 - 0.375)  # 0, 1, 2 or 3
    r = x
    for part in HALF_PI:
        r = r - quarters * part
    even, odd = _series(COS, r * r), r * _series(SIN, r * r)
    is_odd = (turned == 1.0) | (turned == 3.0)
    is_negative = (turned == 1.0) | (turned == 2.0)
    result = where(is_odd, odd, even)
    return where(abs(x) < INFINITY, where(is_negative, 0.0 - result, result), NAN)


def _log(x: Any) -> tuple[Any, Any]:
    """The logarithm as the sum of two numbers, for positive and finite x; of any other, 0."""
    m, k = _mantissa_and_exponent(where((x > 0.0) & (x < INFINITY), x, 1.0))
    is_large = m > SQRT2
    m, k = where(is_large, 0.5 * m, m), where(is_large, k + 1.0, k)
    f, g = m - 1.0, m + 1.0  # f is exact
    s = divide(f, g)
    product = s * g
    residual = ((f - product) - _product_error(s, g, product)) - s * (m - (g - 1.0))
    z = s * s
    tail = 2.0 * divide(residual, g) + s * z * _series(ATANH, z)
    first = k * LN2[0]
    high = first + 2.0 * s
    low = (2.0 * s - (high - first)) + (k * LN2[1] + tail)
    total = high + low
    return total, low - (total - high)


def _exp(x: Any, rest: Any) -> Any:
    """exp(x + rest), where ``rest`` is smaller than an ulp of x."""
    bounded = _clamped(where(x == x, x, 0.0), -750.0, 710.0)
    n = _nearest(bounded * ONE_OVER_LN2)
    r = ((bounded - n * LN2[0]) - n * LN2[1]) + rest
    large = _clamped(n, -LARGEST_SHIFT, LARGEST_SHIFT)
    result = _series(EXP, r) * _power_of_two(large) * _power_of_two(n - large)
    return where(x == x, result, NAN)


def _number(x: Any) -> Any:
    """A number or step count as a float, anything else as float64."""
    if isinstance(x, (int, float, np.generic)):
        return float(x)
    if isinstance(x, torch.Tensor):
        return x.double()
    return x.astype(np.float64) if isinstance(x, np.ndarray) else 1.0 * x


def _clamped(x: Any, low: float, high: float) -> Any:
    return where(x < low, low, where(x > high, high, x))


def _nearest(x: Any) -> Any:
    """The nearest integer, for numbers below 2**51."""
    return (x + ROUNDS) - ROUNDS


def _series(coefficients: Sequence[float], x: Any) -> Any:
    result = coefficients[-1] + 0.0 * x
    for c in reversed(coefficients[:-1]):
        result = result * x + c
    return result


def _product_error(a: Any, b: Any, product: Any) -> Any:
    """``a * b - product``, where ``product`` is a * b rounded: exact, by products of halves (Dekker)."""
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(a: Any) -> tuple[Any, Any]:
    wide = a * SPLITS
    high = wide - (wide - a)
    return high, a - high


def _mantissa_and_exponent(x: Any) -> tuple[Any, Any]:
    """m in [1, 2) and k with x = m * 2**k, exactly; for positive and finite x."""
    if isinstance(x, float):
        m, exponent = math.frexp(x)
        return 2.0 * m, exponent - 1.0
    k = 0.0 * x
    for _ in range(2):  # denormal numbers need it twice
        is_small = x < 1.0
        x, k = where(is_small, x * 2.0**537, x), where(is_small, k - 537.0, k)
    for bit in BITS:
        is_large = x >= 2.0**bit
        x, k = where(is_large, x * 2.0**-bit, x), where(is_large, k + bit, k)
    return x, k


def _power_of_two(n: Any) -> Any:
    """2**n, exactly; for integers up to LARGEST_SHIFT and down to -LARGEST_SHIFT."""
    if isinstance(n, float):
        return math.ldexp(1.0, int(n))
    is_negative, left, result = n < 0.0, abs(n), 1.0 + 0.0 * n
    for bit in BITS:
        has_bit = left >= bit
        factor = where(is_negative, 2.0**-bit, 2.0**bit)
        left, result = where(has_bit, left - bit, left), where(has_bit, result * factor, result)
    return result
