"""A bfloat16 weight that the model computes with, and its low-order bits: master weights without a second copy.

Together they are a float32 (``bf16+16``, exactly) or the upper 24 bits of one (``bf16+8``, rounded stochastically).
The bfloat16 part is rounded to nearest, so the rest is signed: float32's bits are ``(high << 16) + low``.

Someone else may write the weight between two steps (``param.zero_()``, ``load_state_dict``), and the low bits stay:
noise below half a bfloat16 step. But a zero or an infinity with low bits may be a NaN. Encode never makes such a pair,
except from a NaN, and decode leaves the low bits out.
"""

from __future__ import annotations

import torch

from fusedadam.formats.format import Array, Float, Format, Word, bits_of_float, float_of_bits, where


def join(high: Word, low: Word) -> Float:
    whole = float_of_bits((high << 16) + low)
    return where(whole != whole, float_of_bits(high << 16), whole)


def decode_16(high: Word, low: Word) -> Float:
    return join(high, low)


def decode_8(high: Word, low: Word) -> Float:
    return join(high, low << 8)


def encode_16(x: Float) -> tuple[Word, Word]:
    bits = where(x != x, 0x7FC00000, bits_of_float(x))
    return (bits + 0x8000) >> 16, (bits << 16) >> 16


def encode_8(x: Float, noise: Word) -> tuple[Word, Word]:
    bits = where(x != x, 0x7FC00000, bits_of_float(x) + ((noise >> 24) & 0xFF))
    return (bits + 0x8000) >> 16, (bits << 16) >> 24


SPLIT_16 = Format(
    "bf16_16", (Array(torch.bfloat16), Array(torch.int16, "_low")), decode_16, encode_16, "bf16+16", is_for="weights"
)
SPLIT_8 = Format(
    "bf16_8", (Array(torch.bfloat16), Array(torch.int8, "_low")), decode_8, encode_8, "bf16+8", is_for="weights",
    takes_noise=True, is_stochastic=True, rounds=True,
)  # fmt: skip
