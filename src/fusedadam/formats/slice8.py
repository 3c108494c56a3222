"""Eight bits for a value, and one exponent for 32 of them: a slice of float32's bits, below the block's largest value.

A float32 without its sign is a number of steps: ``bits >> 19`` counts sixteenths of a binade. A code counts the same
steps from a base, such that the block's largest value just fits: 8 bits are 16 binades. A signed value has a bit less,
so its steps are eighths. The base follows from the exponent of the largest value, which is kept once for the block.

Non-negative   code 0 is the smallest step, not zero, unless the whole block is zero: no second moment becomes zero
Signed         code 0 is zero

Values are rounded stochastically before they are measured. An infinity or a NaN stays one, and costs its block: the
other 31 become the smallest step below it.
"""

from __future__ import annotations

import torch

from fusedadam.formats.format import Array, Float, Format, Word, bits_of_float, float_of_bits, where


def magnitude(x: Float) -> Word:
    """Without the sign. NaNs that arithmetic makes, which have all kinds of bits, become the same one."""
    bits = bits_of_float(x) & 0x7FFFFFFF
    return where(bits > 0x7FC00000, 0x7FC00000, bits)


# --- non-negative: 4 bits of mantissa --------------------------------------------------------------------------------
def measure(x: Float, noise: Word) -> Word:
    return (magnitude(x) + ((noise >> 13) & 0x7FFFF)) >> 19


def exponent(largest: Word) -> Word:
    return largest >> 4


def base(exponent: Word) -> Word:
    return where(exponent > 15, (exponent << 4) - 240, 0)


def encode(steps: Word, exponent: Word, x: Float) -> Word:
    code = steps - base(exponent)
    return where(code < 0, 0, code)


def decode(code: Word, exponent: Word) -> Float:
    return float_of_bits((code << 19) + (base(exponent) << 19))


# --- signed: 3 bits of mantissa, and the sign ------------------------------------------------------------------------
def measure_signed(x: Float, noise: Word) -> Word:
    return (magnitude(x) + ((noise >> 12) & 0xFFFFF)) >> 20


def exponent_signed(largest: Word) -> Word:
    return largest >> 3


def base_signed(exponent: Word) -> Word:
    return where(exponent > 15, (exponent << 3) - 120, 0)


def encode_signed(steps: Word, exponent: Word, x: Float) -> Word:
    code = steps - base_signed(exponent)
    return where(code < 0, 0, code) | ((bits_of_float(x) >> 24) & 0x80)


def decode_signed(code: Word, exponent: Word) -> Float:
    steps = code & 0x7F
    return float_of_bits(where(steps == 0, 0, (steps << 20) + (base_signed(exponent) << 20)) | ((code >> 7) << 31))


ARRAYS = (Array(torch.uint8, "_codes"), Array(torch.uint8, "_exponents", by="block"))
SLICE8 = Format(
    "slice8", ARRAYS, decode, encode, "slice8", "non-negative", "states", measure, exponent,
    takes_noise=True, is_stochastic=True, rounds=True,
)  # fmt: skip
SLICE8_SIGNED = Format(
    "slice8_signed", ARRAYS, decode_signed, encode_signed, "slice8", "signed", "states", measure_signed,
    exponent_signed, takes_noise=True, is_stochastic=True, rounds=True,
)  # fmt: skip
