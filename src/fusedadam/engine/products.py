"""Products of matrices between two rounds of a step: memory for their operands, and how many of them fit into it.

Kernels store the operands as the parameters lie in memory, one after the other: a stack of matrices of one shape,
(matrices, rows, columns). A backend replaces each of them by its product, and kernels of the next round read the result
in the same place. All launches of a step use the same memory, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Member
from fusedadam.formats import compute_dtype

SMALLEST_LIMIT = 512 << 20  # bytes of memory for products that a step may take in any case
LARGEST_SHARE = 0.05  # of the parameters' memory that it may take, if that is more
ALIGNMENT = 256  # bytes
TORCHS_BYTES = 2 * (2 + 5)  # for each element, beside the operand: in 16 bits two copies, and five squares at most


class Memory(NamedTuple):
    """Of a chunk. Chunks of a device and dtype share it."""

    operands: Tensor | None = None
    scratch: Tensor | None = None  # bytes


def in_chunks(by_key: Iterable[Sequence[int]], members: Sequence[Member]) -> Iterator[list[int]]:
    """Members with the same launch key, divided where their matrices need more memory than a step may take."""
    limit = _limit(members)
    for indices in by_key:
        chunk, taken = list[int](), 0
        for k in indices:
            needed = members[k].matrices.depth * sum(_bytes(members[k])) if _multiplies(members[k]) else 0
            if chunk and taken + needed > limit:
                yield chunk
                chunk, taken = [], 0
            chunk.append(k)
            taken += needed
        yield chunk


def memory(chunks: Sequence[Sequence[int]], members: Sequence[Member]) -> list[Memory]:
    """For each chunk, the memory of its operands and products. If a single parameter is a stack that needs more than
    the limit, its matrices are multiplied in parts."""
    limit, needed = _limit(members), list[tuple[torch.device, torch.dtype, int, int] | None]()
    total = dict[tuple[torch.device, torch.dtype], int]()
    for chunk in chunks:
        first = members[chunk[0]]
        if not _multiplies(first):
            needed.append(None)
            continue
        device, dtype = first.roles["param"].device, compute_dtype(first.roles["param"].dtype)
        (operand, scratch), count = _bytes(first), sum(members[k].matrices.depth for k in chunk)
        own = first.backend.scratch(first.matrices, dtype, device) is not None
        at_once = min(count, max(1, (limit - count * operand) // max(1, scratch))) if own else 0
        needed.append((device, dtype, count * operand, _aligned(count * operand)))
        total[device, dtype] = max(total.get((device, dtype), 0), _aligned(count * operand) + at_once * scratch)
    made = {key: torch.empty(nbytes, dtype=torch.uint8, device=key[0]) for key, nbytes in total.items()}
    return [
        Memory() if of is None else Memory(made[of[:2]][: of[2]].view(of[1]), made[of[:2]][of[3] :]) for of in needed
    ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _multiplies(member: Member) -> bool:
    return member.specialized.product is not None


def _limit(members: Sequence[Member]) -> int:
    every = sum(member.roles["param"].numel() * member.roles["param"].element_size() for member in members)
    return max(SMALLEST_LIMIT, int(LARGEST_SHARE * every))


def _bytes(member: Member) -> tuple[int, int]:
    """Of one of its matrices: of the operand, and of what its product takes besides."""
    dtype, count = compute_dtype(member.roles["param"].dtype), member.matrices.rows * member.matrices.columns
    scratch = member.backend.scratch(member.matrices, dtype, member.roles["param"].device)
    return count * dtype.itemsize, count * TORCHS_BYTES if scratch is None else scratch


def stack_of(table: LaunchTable) -> Tensor:
    """The operands of a table, (matrices, rows, columns)."""
    assert table.operands is not None
    rows, columns = table.matrix_shape
    return table.operands.view(table.operands.numel() // max(1, rows * columns), rows, columns)
