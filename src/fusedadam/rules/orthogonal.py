"""Newton-Schulz iterations in torch's products of matrices, for any device and dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedadam.rules.newton_schulz import NewtonSchulz, Triple
from fusedadam.tensors.matrices import largest, narrowed, shifts_for

SMALLEST_NORM = 1e-15  # above it, no square that matters underflows in float32
SMALLEST_BLOCK, BLOCKS = 256, 4  # rows of a symmetric product, and how many blocks of them
# Multiplications of a symmetric product on a CPU, up to which blocks of it take longer than they save: of 512 or 768
# rows in float32, of 1,024 in bfloat16, on two cores with AVX-512
WHOLE_UP_TO: dict[torch.dtype, int] = {torch.float32: 1 << 28, torch.float64: 1 << 28, torch.bfloat16: 1 << 30}


def orthogonalize(stack: Tensor, method: NewtonSchulz) -> None:
    """Replaces each matrix of ``stack``, (matrices, rows, columns), by its orthogonalized one.

    Norms are those of the narrowed matrices: the results do not depend on whether another process has narrowed them
    before, to send them.

    In torch's matrix products, for any device. On a CPU one by one: batches of small matrices are faster, but the bits
    of each would depend on the others.
    """
    if stack.numel() == 0:
        return
    dtype = product_dtype(stack)
    if stack.device.type == "cpu" and dtype != torch.float16:  # which only tests choose on a CPU
        for matrix in stack.unbind():
            _orthogonalize_one(matrix, dtype, method)
        return
    shifts = shifts_for(largest(stack)) if dtype == torch.float16 else None
    narrow, compute = narrowed(stack, shifts, dtype), torch.promote_types(dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(narrow, dim=(1, 2), keepdim=True, dtype=torch.float64)
    if shifts is None:
        norm.clamp_(min=method.eps)
    else:
        norm = torch.maximum(norm, method.eps * torch.exp2(shifts.double()).view(-1, 1, 1))
    out, operand = (stack, narrow) if stack.shape[1] <= stack.shape[2] else (stack.mT, narrow.mT)
    out.copy_(iterate((operand.to(compute) / norm.to(compute)).to(dtype), method.coefficients))


def _orthogonalize_one(matrix: Tensor, dtype: torch.dtype, method: NewtonSchulz) -> None:
    narrow = matrix.to(dtype)
    norm = max(_norm(narrow), method.eps)  # max() keeps a NaN that comes first
    out, operand = (matrix, narrow) if matrix.shape[0] <= matrix.shape[1] else (matrix.mT, narrow.mT)
    out.copy_(iterate(operand / norm, method.coefficients))  # by a number: 16 bits are divided in float32


def _norm(matrix: Tensor) -> float:
    """Squares of float32 may overflow, or be too small to add up; float64 takes much longer."""
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    norm = float(torch.linalg.vector_norm(matrix))
    if SMALLEST_NORM < norm < math.inf:
        return norm
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))


def iterate(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """The plain iteration. ``x``: (rows, columns) or a stack of these, with rows <= columns and norms of at most 1."""
    for a, b, c in coefficients:
        if x.dim() == 2:
            gram = times_transpose(x)
            x = torch.addmm(x, times_transpose(gram, gram, alpha=c, beta=b), x, beta=a)
        else:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def times_transpose(x: Tensor, added: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """x x^T, or alpha x x^T + beta ``added``. Both are symmetric: blocks left of the diagonal are copied. With four
    blocks of rows, that saves three of eight multiplications. Where a product is fast, smaller ones and copies cost
    more than they save."""
    rows, is_fast = len(x), x.dtype == torch.bfloat16 and _multiplies_tiles()
    if rows <= SMALLEST_BLOCK or is_fast or rows * x.numel() <= WHOLE_UP_TO.get(x.dtype, 0):
        return x @ x.mT if added is None else torch.addmm(added, x, x.mT, alpha=alpha, beta=beta)
    height = max(SMALLEST_BLOCK, -(-rows // BLOCKS))
    result = x.new_empty(rows, rows)
    for begin in range(0, rows, height):
        end, block, rest = begin + height, x[begin : begin + height], x[begin:].mT
        if added is None:
            upper = block @ rest
        else:
            upper = torch.addmm(added[begin:end, begin:], block, rest, alpha=alpha, beta=beta)
        result[begin:end, begin:] = upper
        result[end:, begin:end] = upper[:, height:].mT
    return result


def product_dtype(stack: Tensor) -> torch.dtype:
    """What products are computed in: float16 has more bits than bfloat16, and a normalized matrix needs no larger
    range; of CPUs, some multiply bfloat16 several times as fast as float32, and few float16 at all."""
    if stack.dtype == torch.float64:
        return torch.float64
    if stack.device.type == "cuda":
        return torch.float16
    if stack.device.type == "cpu" and _multiplies_bfloat16():
        return torch.bfloat16
    return torch.float32


def _multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and (_has("_is_avx512_bf16_supported") or _multiplies_tiles())


def _multiplies_tiles() -> bool:
    return _has("_is_amx_tile_supported")


def _has(name: str) -> bool:
    """Whether torch says that the processor has it; older versions lack the function."""
    return bool(getattr(torch.cpu, name, lambda: False)())
