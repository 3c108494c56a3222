"""Products of matrices between two rounds of a step: memory for their operands, and how many of them fit into it.

Kernels store the operands as the parameters lie in memory, one after the other: a stack of matrices of one shape,
(matrices, rows, columns). A backend replaces each of them by its product, and kernels of the next round read the result
in the same place. All launches of a step use the same memory, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Member
from fusedadam.formats import compute_dtype

SMALLEST_LIMIT = 512 << 20  # bytes of memory for products that a step may take in any case
LARGEST_SHARE = 0.05  # of the parameters' memory that it may take, if that is more
# Bytes for each element: the operand in float32, and for its product two copies and five squares in 16 bits.
BYTES_PER_ELEMENT = 4 + 2 * (2 + 5)


def in_chunks(by_key: Iterable[Sequence[int]], members: Sequence[Member]) -> Iterator[list[int]]:
    """Members with the same launch key, divided where their matrices need more memory than a step may take."""
    every = sum(member.roles["param"].numel() * member.roles["param"].element_size() for member in members)
    limit = max(SMALLEST_LIMIT, int(LARGEST_SHARE * every)) // BYTES_PER_ELEMENT
    for indices in by_key:
        chunk, elements = list[int](), 0
        for k in indices:
            count = members[k].roles["param"].numel() if members[k].specialized.product is not None else 0
            if chunk and elements + count > limit:
                yield chunk
                chunk, elements = [], 0
            chunk.append(k)
            elements += count
        yield chunk


def operands(chunks: Sequence[Sequence[int]], members: Sequence[Member]) -> list[Tensor | None]:
    """For each chunk, the memory of its operands: the same for all chunks of a device and dtype."""

    def needed(chunk: Sequence[int]) -> tuple[torch.device, torch.dtype, int]:
        params = [members[k].roles["param"] for k in chunk]
        return params[0].device, compute_dtype(params[0].dtype), sum(p.numel() for p in params)

    multiplied = [members[chunk[0]].specialized.product is not None for chunk in chunks]
    found = [needed(chunk) for chunk, is_product in zip(chunks, multiplied, strict=True) if is_product]
    memory: Mapping[tuple[torch.device, torch.dtype], Tensor] = {
        (device, dtype): torch.empty(max(n for *key, n in found if key == [device, dtype]), dtype=dtype, device=device)
        for device, dtype in dict.fromkeys((device, dtype) for device, dtype, _ in found)
    }
    return [
        memory[needed(chunk)[:2]][: needed(chunk)[2]] if is_product else None
        for chunk, is_product in zip(chunks, multiplied, strict=True)
    ]


def stack_of(table: LaunchTable) -> Tensor:
    """The operands of a table, (matrices, rows, columns)."""
    assert table.operands is not None
    rows, columns = table.matrix_shape
    return table.operands.view(table.operands.numel() // max(1, rows * columns), rows, columns)
