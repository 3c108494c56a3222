"""The Triton kernels that finish sums: segments into rows and tensors, and tensors into sums over several of them.

All of them add in the order of ``fusedadam.rules.sums``. ``LANES`` may be fewer than its ``UPPER_LANES`` where there
are fewer terms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedadam.backends.triton.ops import fold, maximum


@triton.jit
def added(lanes, terms, LARGEST: tl.constexpr):
    if LARGEST:
        result = maximum(lanes, terms)
    else:
        result = lanes + terms
    return result


@triton.jit
def address(table, tensors, sum_fields, k, t, KIND: tl.constexpr):
    """Of the terms (0) or results (1) of this program's sum, for the t-th tensor. ``sum_fields``: both, sum by sum."""
    return tl.load(table + tl.load(sum_fields + 2 * tl.program_id(1) + k) * tensors + t).to(tl.pointer_type(KIND))


@triton.jit
def row_sums(
    terms, row, live, count, ROWS: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr
):
    """The sums of some rows of ``count`` terms."""
    lanes = tl.zeros((ROWS, LANES), tl.float64)
    for begin in range(0, count, LANES):
        k = begin + tl.arange(0, LANES)[None, :]
        here = tl.load(terms + row[:, None] * count + k, mask=live[:, None] & (k < count), other=0)
        lanes = added(lanes, here.to(tl.float64), LARGEST)
    return fold(lanes, ROWS, LANES, LOG, LARGEST)


@triton.jit(do_not_specialize=["tensors", "count_field"])
def combine_tensors(
    table, numbers, tensors, sum_fields, count_field,
    KIND: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One program a tensor and sum."""
    t = tl.program_id(0)
    segments = address(table, tensors, sum_fields, 0, t, KIND)
    count = tl.load(table + count_field * tensors + t)
    lanes = tl.zeros((1, LANES), tl.float64)
    for begin in range(0, count, LANES):
        k = begin + tl.arange(0, LANES)[None, :]
        lanes = added(lanes, tl.load(segments + k, mask=k < count, other=0).to(tl.float64), LARGEST)
    result = numbers + tl.load(sum_fields + 2 * tl.program_id(1) + 1) * tensors + t
    tl.store(result + tl.arange(0, 1), fold(lanes, 1, LANES, LOG, LARGEST))


@triton.jit(do_not_specialize=["tensors", "rows_field", "pieces_field"])
def combine_rows(
    table, tensors, sum_fields, chunk_tensor, chunk_first, rows_field, pieces_field,
    KIND: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One program for some rows of a tensor, and a sum."""
    t = tl.load(chunk_tensor + tl.program_id(0))
    segments = address(table, tensors, sum_fields, 0, t, KIND)
    results = address(table, tensors, sum_fields, 1, t, KIND)
    count = tl.load(table + pieces_field * tensors + t)
    row = tl.load(chunk_first + tl.program_id(0)) + tl.arange(0, ROWS)
    live = row < tl.load(table + rows_field * tensors + t)
    result = row_sums(segments, row, live, count, ROWS, LANES, LOG, LARGEST)
    tl.store(results + row, result.to(KIND), mask=live)


@triton.jit(do_not_specialize=["tensors", "columns_field", "segments_field", "width_field"])
def combine_columns(
    table, tensors, sum_fields, chunk_tensor, chunk_first, columns_field, segments_field, width_field,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One program for some columns of a tensor, and a sum."""
    t = tl.load(chunk_tensor + tl.program_id(0))
    segments = address(table, tensors, sum_fields, 0, t, KIND)
    results = address(table, tensors, sum_fields, 1, t, KIND)
    count = tl.load(table + segments_field * tensors + t)
    width = tl.load(table + width_field * tensors + t)
    column = tl.load(chunk_first + tl.program_id(0)) + tl.arange(0, COLUMNS)
    live = column < tl.load(table + columns_field * tensors + t)
    matrix = column // width
    first = matrix * count * width + (column - matrix * width)
    lanes = tl.zeros((LANES, COLUMNS), tl.float64)  # neighbors in memory side by side
    for begin in range(0, count, LANES):
        k = begin + tl.arange(0, LANES)[:, None]
        terms = tl.load(segments + first[None, :] + k * width, mask=live[None, :] & (k < count), other=0)
        lanes = added(lanes, terms.to(tl.float64), LARGEST)
    tl.store(results + column, fold(tl.trans(lanes), COLUMNS, LANES, LOG, LARGEST).to(KIND), mask=live)


@triton.jit(do_not_specialize=["tensors", "rows_field", "height_field"])
def sum_by_matrix(
    table, tensors, sum_fields, chunk_tensor, chunk_first, rows_field, height_field,
    KIND: tl.constexpr, MATRICES: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One program for some matrices of a tensor, and a sum: over the values of a matrix's rows, for each of them."""
    t = tl.load(chunk_tensor + tl.program_id(0))
    terms = address(table, tensors, sum_fields, 0, t, KIND)
    results = address(table, tensors, sum_fields, 1, t, KIND)
    height = tl.load(table + height_field * tensors + t)
    matrix = tl.load(chunk_first + tl.program_id(0)) + tl.arange(0, MATRICES)
    live = matrix * height < tl.load(table + rows_field * tensors + t)
    result = row_sums(terms, matrix, live, height, MATRICES, LANES, LOG, LARGEST).to(KIND)[:, None]
    for begin in range(0, height, LANES):
        k = begin + tl.arange(0, LANES)[None, :]
        wide = tl.broadcast_to(result, (MATRICES, LANES))
        tl.store(results + matrix[:, None] * height + k, wide, mask=live[:, None] & (k < height))


@triton.jit
def across(terms, results, begins, LANES: tl.constexpr, LOG: tl.constexpr, LARGEST: tl.constexpr):
    """One program a sum: ``terms`` are the addresses of what is added, ``results`` of where the sum goes."""
    first = tl.load(begins + tl.program_id(0))
    end = tl.load(begins + tl.program_id(0) + 1)
    lanes = tl.zeros((1, LANES), tl.float64)
    for begin in range(first, end, LANES):
        k = begin + tl.arange(0, LANES)[None, :]
        at = tl.load(terms + k, mask=k < end, other=0).to(tl.pointer_type(tl.float64))
        lanes = added(lanes, tl.load(at, mask=k < end, other=0), LARGEST)
    result = fold(lanes, 1, LANES, LOG, LARGEST)[:, None]
    for begin in range(first, end, LANES):
        k = begin + tl.arange(0, LANES)[None, :]
        at = tl.load(results + k, mask=k < end, other=0).to(tl.pointer_type(tl.float64))
        tl.store(at, tl.broadcast_to(result, (1, LANES)), mask=k < end)
