"""The sets of parameters that speed is measured on: the shapes of real models, and the awkward cases."""

from __future__ import annotations

import random

Shape = tuple[int, ...]


def gpt() -> list[Shape]:
    """GPT-2 small: 124.4M in 146 tensors."""
    width = 768
    layer: list[Shape] = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    layer += [(3 * width,), (width,), (4 * width,), (width,), (width,), (width,), (width,), (width,)]
    return [(50257, width), (1024, width), *(12 * layer)]


def llama() -> list[Shape]:
    """Four layers of a 7B Llama and its embedding: 940.6M in 37 tensors."""
    width, inner = 4096, 11008
    layer: list[Shape] = 4 * [(width, width)] + [(inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(32000, width), *(4 * layer)]


def one(millions: float) -> list[Shape]:
    return [(round(millions * 2**20),)]


def many_small(largest: int, count: int = 1000) -> list[Shape]:
    """Sizes from 64 to ``largest``, as many between 64 and 128 as between half the largest and the largest."""
    draw = random.Random(0)
    return [(round(64 * (largest / 64) ** draw.random()),) for _ in range(count)]
