"""Orthogonalization: the nearest matrix whose singular values are all 1, by a few Newton-Schulz iterations.

An iteration is an odd polynomial of a matrix, X <- a X + b (X X^T) X + c (X X^T)^2 X. It keeps the singular vectors and
changes every singular value s to a s + b s^3 + c s^5. After some of them, singular values between 0 and 1 are near 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Triple: TypeAlias = tuple[float, float, float]

# https://kellerjordan.github.io/posts/muon: the steepest at 0; singular values end between 0.68 and 1.15
KELLER: Triple = (3.4445, -4.7750, 2.0315)
# https://github.com/KellerJordan/modded-nanogpt, by You Jiacheng: one polynomial for each of five iterations
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
# https://arxiv.org/abs/2505.16932, Algorithm 1; all but the last for singular values up to 1.01 instead of 1
SAFETY = 1.01
POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    )),
    (1.875, -1.25, 0.375),
)  # fmt: skip
NAMED: dict[str, tuple[Triple, ...]] = {"keller": (KELLER,), "you": YOU, "polar-express": POLAR_EXPRESS}


class NewtonSchulz(NamedTuple):
    """How ``orthogonalized`` iterates: what the method ``newton_schulz`` of an optimizer's class returns.

    Args:
        coefficients: one triple (a, b, c) for each iteration
        eps: lower limit of the norm that a matrix is divided by first; above 0
    """

    coefficients: tuple[Triple, ...] = (KELLER,) * 5
    eps: float = 1e-7


DEFAULT = NewtonSchulz()


def checked(method: Any, owner: str) -> NewtonSchulz:
    """What a class says about its iterations, as hashable numbers; refused if it is something else."""
    if not isinstance(method, NewtonSchulz):
        raise TypeError(f"{owner} returned a {type(method).__name__}; it must return a fusedadam.NewtonSchulz")
    if method is DEFAULT:
        return method
    try:
        coefficients = tuple(_triple(*triple) for triple in method.coefficients)
    except (TypeError, ValueError):
        raise ValueError(
            f"{owner} returned coefficients={method.coefficients!r}; it must have a triple (a, b, c) of numbers for "
            "each iteration, such as ((3.4445, -4.775, 2.0315),) * 5"
        ) from None
    eps = method.eps
    if not (isinstance(eps, (int, float)) and 0 < eps < math.inf and all(map(math.isfinite, sum(coefficients, ())))):
        raise ValueError(f"{owner} returned {method!r}; coefficients must be finite, and eps above 0")
    return NewtonSchulz(coefficients, float(eps))


SMALLEST_NORM = 1e-15  # above it, no square that matters underflows in float32
# float16 holds values below 2**16; float32 has exponents that begin at -127, and powers of two of either sign up to 126
LARGEST_EXPONENT, MOST_SHIFTED, MANTISSA_BITS = 127 + 14, 126, 23
ROUNDED_UP = 1 << 12  # half of the last bit that float16 has of a float32: all ones round to the next power of two
SMALLEST_BLOCK, BLOCKS = 256, 4  # rows of a symmetric product, and how many blocks of them
# Multiplications of a symmetric product on a CPU, up to which blocks of it take longer than they save: of 512 or 768
# rows in float32, of 1,024 in bfloat16, on two cores with AVX-512
WHOLE_UP_TO: dict[torch.dtype, int] = {torch.float32: 1 << 28, torch.float64: 1 << 28, torch.bfloat16: 1 << 30}


def coefficients_of(given: str | Sequence[float], steps: int) -> tuple[Triple, ...]:
    """Of each iteration: a triple serves all of them, a named set one after the other, its last one as often as
    needed."""
    known = NAMED[given] if isinstance(given, str) else (_triple(*given),)
    return (*known[:steps], *known[-1:] * (steps - len(known)))


def _triple(a: float, b: float, c: float) -> Triple:
    return float(a), float(b), float(c)


class Matrices(NamedTuple):
    """A tensor as matrices: two dimensions are one, three a stack of them, and more are one row for each index of the
    first, as the weights of a convolution."""

    depth: int  # of the stack
    rows: int
    columns: int


def matrices_of(shape: Sequence[int]) -> Matrices:
    """``shape``: of two dimensions or more."""
    if len(shape) == 3:
        return Matrices(*shape)
    return Matrices(1, shape[0], math.prod(shape[1:]))


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
    if stack.device.type == "cpu" and dtype != torch.float16:
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
    wide, operand = (stack, narrow) if stack.shape[1] <= stack.shape[2] else (stack.mT, narrow.mT)
    wide.copy_(iterate((operand.to(compute) / norm.to(compute)).to(dtype), method.coefficients))


def _orthogonalize_one(matrix: Tensor, dtype: torch.dtype, method: NewtonSchulz) -> None:
    narrow = matrix.to(dtype)
    norm = max(_norm(narrow), method.eps)  # max() keeps a NaN that comes first
    wide, operand = (matrix, narrow) if matrix.shape[0] <= matrix.shape[1] else (matrix.mT, narrow.mT)
    wide.copy_(iterate(operand / norm, method.coefficients))  # by a number: 16 bits are divided in float32


def largest(matrices: Tensor) -> Tensor:
    """The largest absolute value of each matrix, or of each part of one."""
    if matrices.numel() == 0:
        return matrices.new_zeros(len(matrices))
    found: Tensor = torch.linalg.vector_norm(matrices.flatten(1), math.inf, dim=1)
    return found


def shifts_for(largest: Tensor) -> Tensor:
    """The powers of two that take matrices with these largest values, float32, to the upper end of float16, as
    integers: small values keep their bits. They are the same for the narrowed matrices."""
    exponents = (largest.view(torch.int32) + ROUNDED_UP) >> MANTISSA_BITS
    return (LARGEST_EXPONENT - exponents).clamp_(-MOST_SHIFTED, MOST_SHIFTED)


def narrowed(matrices: Tensor, shifts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """In the dtype of the products; times powers of two, which change no bit of a float32, for float16, whose range is
    smaller."""
    if shifts is None:
        return matrices.to(dtype)
    factors = torch.exp2(shifts.to(matrices.dtype)).view(-1, *[1] * (matrices.dim() - 1))
    return (matrices * factors).to(dtype)


def widen(narrow: Tensor, shifts: Tensor | None, out: Tensor) -> None:
    """The inverse of ``narrowed``, which adds no rounding of its own."""
    if shifts is None:
        out.copy_(narrow)
    else:
        torch.mul(narrow.to(out.dtype), torch.exp2(-shifts.to(out.dtype)).view(-1, 1, 1), out=out)


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
