"""The sets of parameters that speed is measured on: shapes of real models, and awkward cases."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

Shape = tuple[int, ...]
SMALLEST_WIDTH = 16  # smaller dimensions, such as those of a convolution's kernel, are not scaled


def parameters(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def shrunk(shapes: Sequence[Shape], by: int) -> list[Shape]:
    """The same number of tensors with every width divided, for smaller machines."""
    return [tuple(max(SMALLEST_WIDTH, d // by) if d > SMALLEST_WIDTH else d for d in shape) for shape in shapes]


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


def many_small(largest: int, count: int = 1000) -> list[Shape]:
    """Sizes from 64 to ``largest``, evenly spread on a logarithmic scale."""
    draw = random.Random(0)
    return [(round(64 * (largest / 64) ** draw.random()),) for _ in range(count)]


def by_name(device: str) -> dict[str, Callable[[], list[Shape]]]:
    """The sets that --shapes accepts. Small tensors are larger on a GPU than on a CPU."""
    largest = 4096 if device == "cpu" else 65536
    return {"gpt": gpt, "llama": llama, "many-small": lambda: many_small(largest)}
