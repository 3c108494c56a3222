"""The Triton kernels that multiply matrices, and those that prepare them for it.

``product`` reads and writes blocks by tensor descriptors, which NVIDIA GPUs execute by themselves from Hopper on. What
is beyond a matrix is 0, and not stored. Each element is added up in one order, which depends on the shape alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def below_diagonal(p):
    """The p-th pair of (0, 0), (1, 0), (1, 1), (2, 0) and so on."""
    i = ((tl.sqrt(8.0 * p + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > p, i - 1, i)  # the square root is rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= p, i + 1, i)
    return i, p - i * (i + 1) // 2


@triton.jit
def grouped(p, rows, columns, GROUP: tl.constexpr):
    """The p-th of rows x columns tiles: some rows together go from left to right, so that they share what is loaded."""
    first = p // (GROUP * columns) * GROUP
    size = tl.minimum(rows - first, GROUP)
    return first + p % (GROUP * columns) % size, p % (GROUP * columns) // size


@triton.jit(do_not_specialize=["rows", "columns", "depth", "programs"])
def product(
    a, b, added, out, second, rows, columns, depth, programs, alpha, beta, gamma,
    SYMMETRIC: tl.constexpr, ADDS: tl.constexpr, HAS_SECOND: tl.constexpr, BY_ADDRESS: tl.constexpr,
    A_DOWN: tl.constexpr, B_DOWN: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out = alpha a b + beta added, and second = out + gamma I before it is rounded; of each matrix of a stack.

    Terms are added along the rows of ``a`` and ``b``, or down their columns with ``A_DOWN`` and ``B_DOWN``.
    ``SYMMETRIC``: tiles above the diagonal are written as mirrors of those below. ``BY_ADDRESS``: ``out`` is an
    address, for rows that a descriptor cannot have.
    """
    batch, p = tl.program_id(0) // programs, tl.program_id(0) % programs
    if SYMMETRIC:
        i, j = below_diagonal(p)
    else:
        i, j = grouped(p, tl.cdiv(rows, TILE), tl.cdiv(columns, TILE), 8)
    sums = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, depth, STEP):
        if A_DOWN:
            left = tl.trans(a.load([batch, k, i * TILE]).reshape(STEP, TILE))
        else:
            left = a.load([batch, i * TILE, k]).reshape(TILE, STEP)
        if B_DOWN:
            right = b.load([batch, k, j * TILE]).reshape(STEP, TILE)
        else:
            right = tl.trans(b.load([batch, j * TILE, k]).reshape(TILE, STEP))
        sums = tl.dot(left, right, sums)
    result = alpha * sums
    if ADDS:
        result += beta * added.load([batch, i * TILE, j * TILE]).reshape(TILE, TILE).to(tl.float32)
    x = tl.arange(0, TILE)[:, None]
    y = tl.arange(0, TILE)[None, :]
    if BY_ADDRESS:
        row = batch.to(tl.int64) * rows + i * TILE + x
        live = (i * TILE + x < rows) & (j * TILE + y < columns)
        tl.store(out + row * columns + j * TILE + y, result, mask=live)
    else:
        store_tile(out, result.to(out.dtype), batch, i, j, SYMMETRIC, TILE)
    if HAS_SECOND:
        if i == j:
            result += tl.where(x == y, gamma, 0.0)
        store_tile(second, result.to(second.dtype), batch, i, j, SYMMETRIC, TILE)


@triton.jit
def store_tile(out, tile, batch, i, j, SYMMETRIC: tl.constexpr, TILE: tl.constexpr):
    """A descriptor stores by way of shared memory: stores of a transpose from registers take as long as a product."""
    out.store([batch, i * TILE, j * TILE], tile.reshape(1, TILE, TILE))
    if SYMMETRIC:
        if i > j:
            out.store([batch, j * TILE, i * TILE], tl.trans(tile).reshape(1, TILE, TILE))


@triton.jit(do_not_specialize=["count", "chunk", "parts"])
def squares(matrices, sums, count, chunk, parts, BLOCK: tl.constexpr):
    """The sums of squares of the ``parts`` of each matrix, in float64, whose range is large enough. ``count``: the
    elements of a matrix."""
    matrix, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    begin, end = part.to(tl.int64) * chunk, tl.minimum((part + 1).to(tl.int64) * chunk, count)
    found = tl.zeros((BLOCK,), tl.float64)
    for first in range(begin, end, BLOCK):
        k = first + tl.arange(0, BLOCK)
        value = tl.load(matrices + matrix.to(tl.int64) * count + k, mask=k < end, other=0).to(tl.float64)
        found += value * value
    tl.store(sums + tl.program_id(0), tl.sum(found))


@triton.jit(do_not_specialize=["rows", "columns", "extent", "stride", "parts"])
def normalize(
    matrices, sums, out, rows, columns, extent, stride, parts, scale, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = scale matrix / max(norm, eps). ``extent``, ``stride``: elements of ``out`` from one matrix, or row, to the
    next."""
    across = tl.cdiv(columns, COLUMNS)
    tiles = tl.cdiv(rows, ROWS) * across
    matrix, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    part = tl.arange(0, PARTS)
    norm = tl.sqrt(tl.sum(tl.load(sums + matrix * parts + part, mask=part < parts, other=0)))
    factor = scale / tl.where(norm < eps, eps, norm)
    row = tile // across * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = (row < rows) & (column < columns)
    value = tl.load(matrices + (matrix * rows + row) * columns + column, mask=live).to(tl.float64) * factor
    tl.store(out + matrix * extent + row * stride + column, value.to(tl.float32).to(out.dtype.element_ty), mask=live)
