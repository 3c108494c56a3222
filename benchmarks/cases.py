"""Sets of parameters that only speed.py and small.py measure, beside those of `fusedadam bench`."""

from __future__ import annotations

import random

from fusedadam.cli.harness.shapes import Shape, many_small


def resnet() -> list[Shape]:
    """A ResNet of 14 basic blocks for 1,000 classes: 18.1M in 97 tensors."""

    def normalized(*convolution: int) -> list[Shape]:
        """A convolution without bias, and its batch norm's weight and bias."""
        return [convolution, convolution[:1], convolution[:1]]

    shapes, channels = normalized(64, 3, 7, 7), 64
    for width, blocks in ((64, 5), (128, 3), (256, 3), (512, 3)):
        for _ in range(blocks):
            if width != channels:  # the skip connection must be as wide as the block's result
                shapes += normalized(width, channels, 1, 1)
            shapes += normalized(width, channels, 3, 3) + normalized(width, width, 3, 3)
            channels = width
    return [*shapes, (1000, channels)]


def mlp() -> list[Shape]:
    """Three linear layers: 26,122 in 6 tensors."""
    return [(128, 64), (128,), (128, 128), (128,), (10, 128), (10,)]


def alike(count: int) -> list[Shape]:
    """Matrices of 1,024 elements."""
    return count * [(32, 32)]


def two_matrices() -> list[Shape]:
    return [(4096, 4096), (4096, 4096)]


def awkward_rows() -> dict[str, list[Shape]]:
    """For an optimizer that sums over rows: far too many, far too few, far too short, and ordinary ones."""
    million = 10**6
    return {
        "a million rows of 9": [(million, 9)],
        "one row of 4 million": [(1, 4 * million)],
        "a column of a million": [(million, 1)],
        "4,096 rows of 4,096": [(4096, 4096)],
    }


def one(millions: float) -> list[Shape]:
    return [(round(millions * 2**20),)]


def small_matrices(largest: int, count: int = 1000) -> list[Shape]:
    """The sizes of ``many_small`` (nearly: whole rows only) in 4 to 32 rows."""
    draw = random.Random(1)
    return [(rows, size // rows) for (size,) in many_small(largest, count) for rows in [2 ** draw.randint(2, 5)]]
