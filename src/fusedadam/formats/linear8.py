"""Eight bits for a value, in steps of one size for 32 of them: for momentum that is orthogonalized.

A matrix is orthogonalized as a whole, so an error counts by its size, whichever element it is in. Steps of one size
make the smallest errors for 8 bits: 1.2 % of the root mean square of normally distributed values, where slice8, whose
steps grow with each value, makes 3.8 %. Orthogonalization lifts directions in which a matrix is small to the size of
all others, and with them what rounding has left there.

A code counts steps, from -127 to 127. 64 of them are a power of two, whose exponent is kept once for the block: the
smallest one with which 127 steps reach the largest value, and at least 2**-118. Zero stays zero, and so do subnormal
values. An infinity or a NaN stays one, and the other 31 values of its block become zero.
"""

from __future__ import annotations

import torch

from fusedadam.formats.format import Array, Float, Format, Word, abs, bits_of_float, float_of_bits, where  # noqa: A004
from fusedadam.formats.slice8 import magnitude


def measure(x: Float, noise: Word) -> Word:
    """The value in 64ths of its power of two, rounded up, which orders the values of a block; below it noise for
    encode."""
    bits = magnitude(x)
    finite = where(bits > 0x7F7E0000, where(bits < 0x7F800000, 0x7F7E0000, bits), bits)
    return ((finite + 0x1FFFF) & 0x7FFE0000) | ((noise >> 15) & 0x1FFFF)


def exponent(largest: Word) -> Word:
    found = largest >> 23
    return where(found < 9, 9, found)


def encode(measured: Word, exponent: Word, x: Float) -> Word:
    bits = magnitude(x)
    below = exponent - (bits >> 23)
    whole = where(bits < 0x800000, 0, (bits & 0x7FFFFF) | 0x800000)  # 0 for subnormal values
    mantissa = whole >> where(below > 24, 24, where(below < 0, 0, below))
    steps = (mantissa + (measured & 0x1FFFF)) >> 17
    finite = where(steps > 127, 127, steps)
    special = where(bits > 0x7F800000, 127, where(bits == 0x7F800000, 126, 0))
    code = where(exponent == 255, special, finite)
    return where(bits_of_float(x) < 0, 0 - code, code)


def decode(code: Word, exponent: Word) -> Float:
    steps = abs(code)
    # the leading bit goes to bit 6
    by_4 = where(steps < 8, 4, 0)
    by_2 = where((steps << by_4) < 32, 2, 0) + by_4
    shift = where((steps << by_2) < 64, 1, 0) + by_2
    finite = where(steps == 0, 0, ((exponent - shift) << 23) | (((steps << shift) & 0x3F) << 17))
    special = where(steps == 127, 0x7FC00000, where(steps == 126, 0x7F800000, 0))
    return float_of_bits(where(exponent == 255, special, finite) | ((code >> 31) << 31))


ARRAYS = (Array(torch.int8, "_steps"), Array(torch.uint8, "_largest", by="block"))
LINEAR8 = Format(
    "linear8", ARRAYS, decode, encode, "linear8", "signed", "states", measure, exponent,
    takes_noise=True, is_stochastic=True, rounds=True,
)  # fmt: skip
