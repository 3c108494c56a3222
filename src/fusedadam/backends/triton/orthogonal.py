"""Newton-Schulz iterations as a queue of kernels, in float16.

Two steps with (a1, b1, c1) and (a2, b2, c2) are one polynomial of R = X X^T, so that only one product in seven has the
size of X, and one more is needed for the next R:

    z1 = b1 R + c1 R^2,  y = z1 + a1 I        z1 X + a1 X = y X would be the first step,
    R <- (R y) y,  z2 = b2 R + c2 R^2         z2 (y X) + a2 (y X) the second
    X <- (z2 y + a2 z1) X + a1 a2 X

All of them but the last are symmetric, so half of each is computed, and mirrored. In z2 y + a2 z1 that costs accuracy:
y shrinks large singular values, and should come first; where half of the elements take z2 first, its rounding errors
are not shrunk. Later steps make up for it, so it is computed whole where few follow. Multiples of I are kept out where
they can be: they would hide the low bits of what they are added to. More than two steps on R alone would add up its
rounding errors, and may overflow.

A normalized matrix has small elements, and squares of them lose bits below float16's range; so X begins as a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedadam import compat
from fusedadam.backends.triton import ops, products
from fusedadam.backends.triton.launching import Queue, Ready
from fusedadam.engine import backend
from fusedadam.engine.backend import RunStage
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.rules.newton_schulz import NewtonSchulz, Triple
from fusedadam.tensors.matrices import Matrices

ALIGNMENT = 128  # elements in 16 bits: memory of each matrix begins at a multiple of it
ROW_ALIGNMENT = 8  # of rows, for tensor descriptors
SHARED_MEMORY = 200 << 10  # bytes that the tiles need
SQUARES = 4  # matrices of rows x rows that two steps need
PARTS, PART = 256, 4096  # of a norm: how many at most, and multiples of how many elements
NORMALIZED = (64, 128)  # rows and columns at a time
STEP = 64  # terms that are added at a time


class Tiles(NamedTuple):
    """Of side x side elements."""

    side: int
    warps: int
    stages: int


SMALL, LARGE = Tiles(64, 4, 4), Tiles(128, 4, 3)
FEW_STEPS = 4  # up to which the last product is computed without a mirror
LONGEST_SMALL = 512  # rows of a square, up to which small tiles are faster for one matrix, or for a few


def tiles_for(rows: int) -> Tiles:
    return SMALL if rows <= LONGEST_SMALL else LARGE


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Elsewhere, torch's products are used: without tensor descriptors, or with little shared memory."""
    if dtype != torch.float32 or compat.tensor_descriptor() is None:
        return False
    if ops.INTERPRETED:
        return True
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0)) >= SHARED_MEMORY


def scratch(matrix: Matrices, dtype: torch.dtype, device: torch.device) -> int | None:
    """Bytes for one matrix."""
    if not multiplies(dtype, device):
        return None
    narrow = min(matrix.rows, matrix.columns)
    return 8 * PARTS + 2 * (2 * _extent(matrix.rows, matrix.columns) + SQUARES * _extent(narrow, narrow))


def prepare_orthogonalize(table: LaunchTable, stack: Tensor, memory: Tensor) -> RunStage:
    matrix = Matrices(*stack.shape)
    needed = scratch(matrix, stack.dtype, stack.device)
    if needed is None:
        return backend.prepare_orthogonalize(table, stack, memory)
    parts = stack.split(max(1, memory.numel() // needed)) if stack.numel() else ()
    return Queue(stack.device, [kernel for part in parts for kernel in _kernels(part, memory, table.newton_schulz)])


def _kernels(stack: Tensor, memory: Tensor, method: NewtonSchulz) -> Iterator[Ready]:
    count, rows, columns = stack.shape
    narrow, is_tall = min(rows, columns), rows > columns
    sums = memory[: 8 * PARTS * count].view(torch.float64)
    halves = memory[8 * PARTS * count :].view(torch.float16)
    x, other, *squares = _carved(halves, count, [(rows, columns)] * 2 + [(narrow, narrow)] * SQUARES)
    scale = 2.0 ** round(math.log2(math.sqrt(rows * columns) / 16)) if method.coefficients else 1.0
    yield from _normalized(stack, sums, x if method.coefficients else stack, scale, method.eps)
    left = list(method.coefficients)
    while left:
        steps, left = left[:2], left[2:]
        is_whole = len(method.coefficients) <= FEW_STEPS
        kernels, polynomial, rest = _polynomial(x, squares, steps, scale, is_tall, is_whole)
        yield from kernels
        out, factors = other if left else stack, (x, polynomial) if is_tall else (polynomial, x)
        yield _product(
            *factors, out, tiles_for(narrow), added=x, alpha=1 / scale, beta=rest / scale, is_symmetric=False,
            down=(False, not is_tall),
        )  # fmt: skip
        x, other, scale = out, x, 1.0


def _polynomial(
    x: Tensor, squares: Sequence[Tensor], steps: Sequence[Triple], scale: float, is_tall: bool, is_whole: bool
) -> tuple[list[Ready], Tensor, float]:
    """One step or two: kernels, the polynomial that they compute, and the multiple of I that is not in it.
    ``is_whole``: that of two steps is computed without a mirror."""
    r, z, y, t = squares
    tiles, (a, b, c), *more = tiles_for(len(r[0])), *steps
    kernels = [_product(x, x, r, tiles, alpha=scale**-2, down=(is_tall, is_tall))]
    if not more:
        return [*kernels, _product(r, r, z, tiles, added=r, alpha=c, beta=b)], z, a
    a2, b2, c2 = more[0]
    kernels += [
        _product(r, r, z, tiles, added=r, second=y, alpha=c, beta=b, gamma=a),
        _product(r, y, t, tiles),
        _product(t, y, r, tiles),
        _product(r, r, t, tiles, added=r, alpha=c2, beta=b2),
        _product(t, y, r, tiles, added=z, beta=a2, is_symmetric=not is_whole),
    ]
    return kernels, r, a * a2


def _product(
    a: Tensor, b: Tensor, out: Tensor, tiles: Tiles, *, added: Tensor | None = None, second: Tensor | None = None,
    alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0, is_symmetric: bool = True,
    down: tuple[bool, bool] = (False, False),
) -> Ready:  # fmt: skip
    """See ``products.product``."""
    count, rows, columns = out.shape
    side, warps, stages = tiles
    blocks = -(-rows // side)
    programs = blocks * (blocks + 1) // 2 if is_symmetric else blocks * -(-columns // side)
    by_address = out.dtype == torch.float32 and columns % 4 != 0
    described = [
        _described(a, (STEP, side) if down[0] else (side, STEP)),
        _described(b, (STEP, side) if down[1] else (side, STEP)),
        _described(a if added is None else added, (side, side)),
        out if by_address else _described(out, (side, side)),
        _described(a if second is None else second, (side, side)),
    ]
    arguments = (
        *described, rows, columns, a.shape[1 if down[0] else 2], programs, alpha, beta, gamma,
        is_symmetric, added is not None, second is not None, by_address, *down, side, STEP,
    )  # fmt: skip
    return Ready(out.device, products.product, (programs * count, 1, 1), arguments, warps, num_stages=stages)


def _normalized(stack: Tensor, sums: Tensor, out: Tensor, scale: float, eps: float) -> Iterator[Ready]:
    """The norm of each matrix, and the matrices divided by theirs."""
    (count, rows, columns), elements = stack.shape, stack[0].numel()
    part = -(-elements // (PARTS * PART)) * PART
    parts = -(-elements // part)
    measured = (stack, sums, elements, part, parts, PART)
    yield Ready(stack.device, products.squares, (count * parts, 1, 1), measured, 8)
    across, down = -(-columns // NORMALIZED[1]), -(-rows // NORMALIZED[0])
    arguments = (stack, sums, out, rows, columns, *out.stride()[:2], parts, scale, eps, PARTS, *NORMALIZED)
    yield Ready(stack.device, products.normalize, (count * across * down, 1, 1), arguments, 8)


def _described(tensor: Tensor, block: tuple[int, int]) -> Any:
    return compat.tensor_descriptor()(tensor, list(tensor.shape), list(tensor.stride()), [1, *block])


def _row(columns: int) -> int:
    """Elements from one row to the next."""
    return -(-columns // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _extent(rows: int, columns: int) -> int:
    """Elements from one matrix to the next."""
    return -(-rows * _row(columns) // ALIGNMENT) * ALIGNMENT


def _carved(memory: Tensor, count: int, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Stacks of matrices of these shapes, one after the other."""
    begin = memory.storage_offset()
    for rows, columns in shapes:
        extent = _extent(rows, columns)
        yield memory.as_strided((count, rows, columns), (extent, _row(columns), 1), begin)
        begin += count * extent
