"""bfloat16 with stochastic rounding, for averages: rounded to nearest, a slow one stands still."""

from __future__ import annotations

import torch

from fusedadam.formats.format import Array, Float, Format, Word, bits_of_float, where
from fusedadam.formats.plain import decode_bf16


def encode(x: Float, noise: Word) -> Word:
    return where(x != x, 0x7FC0, (bits_of_float(x) + ((noise >> 16) & 0xFFFF)) >> 16)


BF16_STOCHASTIC = Format(
    "bf16_stochastic", (Array(torch.bfloat16),), decode_bf16, encode, "bf16", is_for="states",
    takes_noise=True, is_stochastic=True, rounds=True,
)  # fmt: skip
