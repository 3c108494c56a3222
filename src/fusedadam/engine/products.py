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
    """For each chunk, the memory of its operands and products. If a single parameter is a stack that is larger than the
    limit, its matrices are multiplied in parts."""
    limit, needed = _limit(members), list[tuple[torch.device, torch.dtype, int, int] | None]()
    for chunk in chunks:
        first = members[chunk[0]]
        if not _multiplies(first):
            needed.append(None)
            continue
        param, (operand, scratch) = first.roles["param"], _bytes(first)
        count = sum(members[k].matrices.depth for k in chunk)
        at_once = min(count, max(1, (limit - count * operand) // max(1, scratch)))
        own = first.backend.scratch(first.matrices, compute_dtype(param.dtype), param.device) is not None
        elements = sum(members[k].roles["param"].numel() for k in chunk)
        needed.append((param.device, compute_dtype(param.dtype), elements, at_once * scratch if own else 0))
    largest = dict[tuple[torch.device, torch.dtype], tuple[int, int]]()
    for device, dtype, *sizes in filter(None, needed):
        before = largest.get((device, dtype), (0, 0))
        largest[device, dtype] = max(before[0], sizes[0]), max(before[1], sizes[1])
    made = {
        (device, dtype): (
            torch.empty(elements, dtype=dtype, device=device), torch.empty(scratch, dtype=torch.uint8, device=device)
        )
        for (device, dtype), (elements, scratch) in largest.items()
    }  # fmt: skip
    return [
        Memory() if sizes is None else Memory(made[sizes[:2]][0][: sizes[2]], made[sizes[:2]][1]) for sizes in needed
    ]


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
