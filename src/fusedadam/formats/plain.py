"""Formats of one plain tensor: the floating-point numbers that the hardware has."""

from __future__ import annotations

import torch

from fusedadam.formats.format import (
    Array,
    Float,
    Format,
    Word,
    abs,  # noqa: A004
    bits_of_float,
    float_of_bits,
    narrow,
    where,
    widen,
)


def decode_bf16(high: Word) -> Float:
    return float_of_bits(high << 16)


def encode_bf16(x: Float) -> Word:
    # rounding could carry a NaN with a full mantissa over into zero
    return where(x != x, 0x7FC0, to_nearest_even(x))


def to_nearest_even(x: Float) -> Word:
    bits = bits_of_float(x)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def round_to_odd(x: Float) -> Float:
    """float64 to float32 such that rounding once more, to fewer bits, gives the same result as rounding only once."""
    near = narrow(x)
    back, bits = widen(near), bits_of_float(near)
    neighbor = where(abs(back) < abs(x), bits + 1, bits - 1)
    move = ((bits & 1) == 0) & ((back < x) | (back > x))
    return float_of_bits(where(move, neighbor, bits))


F32 = Format("f32", (Array(torch.float32),), title="float32")
F16 = Format("f16", (Array(torch.float16),), rounds=True)
BF16 = Format(
    "bf16",
    (Array(torch.bfloat16),),
    decode_bf16,
    encode_bf16,
    encode_if_sole=to_nearest_even,  # NaNs made of bfloat16 values end in 16 zero bits: nothing is carried
    rounds=True,
    native_on=("triton", "eager"),  # one instruction, one pass; Triton's interpreter truncates
)
F64 = Format("f64", (Array(torch.float64),))
