"""Products of matrices between two rounds of a step: memory for their operands, and how many of them fit into it.

Kernels store the operands as the parameters lie in memory, one after the other: a stack of matrices of one shape,
(matrices, rows, columns). A backend replaces each of them by its product, and kernels of the next round read the result
in the same place. Chunks share the memory, one after the other.

A chunk is one launch; or, of sharded matrices, the launches that have parts of them, whose order and size follow from
the parameters alone, so that all processes exchange the same chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.backend import Action
from fusedadam.engine.exchange import MatrixExchange, Parts, Shared, is_exchanged, operations, owners, parts_of
from fusedadam.engine.member import Member
from fusedadam.formats import compute_dtype
from fusedadam.tensors.shards import local, sharding_of

if TYPE_CHECKING:
    from fusedadam.engine.launch import Launch

SMALLEST_LIMIT = 512 << 20  # bytes of memory for products that a step may take in any case
LARGEST_SHARE = 0.05  # of the parameters' memory that it may take, if that is more
# Bytes for each element: the operand in float32, and for its product two copies and five squares in 16 bits. If it is
# exchanged, one chunk is sent and another one received at the same time, with a copy on either side.
BYTES_PER_ELEMENT = 4 + 2 * (2 + 5)
BYTES_UNDER_WAY = 2 * 2 * 2


class Chunk(NamedTuple):
    """``multiply`` replaces the operands that these launches have stored, or those that this process owns."""

    launches: list[int]
    multiply: Action
    number: int | None = None  # among those of sharded matrices
    exchange: MatrixExchange | None = None


def sharded_chunks(members: Sequence[Member]) -> list[list[int]]:
    """Members whose matrices are sharded, and multiplied, in chunks of one shape, sharding and method."""
    alike: dict[Any, list[int]] = {}
    for k, member in enumerate(members):
        whole: Any = member.whole
        if member.specialized.product is not None and whole is not None and sharding_of(whole) is not None:
            product = member.specialized.product.position, member.newton_schulz
            like = local(whole).device.type, compute_dtype(whole.dtype), *product
            key = whole.device_mesh, whole.placements, whole.shape, like
            alike.setdefault(key, []).append(k)
    every = [members[k].whole for own in alike.values() for k in own]
    shares = {id(whole): math.ceil(whole.numel() / _shards(whole)) for whole in every if whole is not None}
    sizes = sum(shares[id(whole)] * whole.element_size() for whole in every if whole is not None)
    chunks = []
    for own in alike.values():
        whole = members[own[0]].whole
        assert whole is not None
        # each process should have a matrix to multiply at a time
        limit = max(_limit(sizes, BYTES_PER_ELEMENT + BYTES_UNDER_WAY), whole.numel())
        count = max(1, limit // max(1, shares[id(whole)]))
        chunks += [own[begin : begin + count] for begin in range(0, len(own), count)]
    return chunks


def _shards(whole: Any) -> int:
    sizes = zip(whole.device_mesh.shape, whole.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def _limit(bytes_of_params: int, per_element: int = BYTES_PER_ELEMENT) -> int:
    """Elements whose products a step may compute at a time."""
    return max(SMALLEST_LIMIT, int(LARGEST_SHARE * bytes_of_params)) // per_element


def in_launches(members: Sequence[Member], chunk_of: Mapping[int, int]) -> Iterator[list[int]]:
    """Members with the same launch key and chunk. Others are divided where their matrices need more memory than a step
    may take."""
    by_key: dict[Any, list[int]] = {}
    for k, member in enumerate(members):
        by_key.setdefault((member.launch_key, chunk_of.get(k)), []).append(k)
    limit = _limit(sum(member.roles["param"].numel() * member.roles["param"].element_size() for member in members))
    for indices in by_key.values():
        launch, elements = list[int](), 0
        for k in indices:
            is_divided = members[k].specialized.product is not None and k not in chunk_of
            count = members[k].roles["param"].numel() if is_divided else 0
            if launch and elements + count > limit:
                yield launch
                launch, elements = [], 0
            launch.append(k)
            elements += count
        yield launch


class Operands(NamedTuple):
    """Memory for operands, the same for all chunks of a device and dtype; members without a gradient have theirs."""

    of_launch: list[Tensor | None]
    of_chunk: dict[int, Tensor]


def operands(launches: Sequence[Sequence[int]], members: Sequence[Member], chunk_of: Mapping[int, int]) -> Operands:
    ends: dict[int, int] = {}
    needed: list[tuple[tuple[torch.device, torch.dtype], int, int] | None] = []
    for indices in launches:
        if members[indices[0]].specialized.product is None:
            needed.append(None)
            continue
        param, chunk = members[indices[0]].roles["param"], chunk_of.get(indices[0])
        begin = 0 if chunk is None else ends.get(chunk, 0)
        end = begin + sum(_here(members[k]).numel() for k in indices)
        if chunk is not None:
            ends[chunk] = end
        needed.append(((param.device, compute_dtype(param.dtype)), begin, end))
    found = [each for each in needed if each is not None]
    memory = {
        key: torch.empty(max(end for own, _, end in found if own == key), dtype=key[1], device=key[0])
        for key in dict.fromkeys(key for key, _, _ in found)
    }
    of_chunk = {
        chunk_of[indices[0]]: memory[each[0]][: ends[chunk_of[indices[0]]]]
        for indices, each in zip(launches, needed, strict=True)
        if each is not None and indices[0] in chunk_of
    }
    return Operands([None if each is None else memory[each[0]][each[1] : each[2]] for each in needed], of_chunk)


def _here(member: Member) -> Tensor:
    whole: Tensor = member.roles["param"] if member.whole is None else local(member.whole)
    return whole


def prepare(
    launches: Sequence[Launch], members: Sequence[Member], sharded: Sequence[Sequence[int]], memory: Operands
) -> list[Chunk]:
    """The chunks in the order in which they are multiplied. ``sharded``: as ``sharded_chunks`` returns them."""
    multiplying = [k for k, launch in enumerate(launches) if launch.product is not None]
    found = [Chunk([k], _each_alone([launches[k]])) for k in multiplying if launches[k].table.chunk is None]
    of_chunk = [[k for k in multiplying if launches[k].table.chunk == n] for n in range(len(sharded))]
    exchanges = dict(_exchanges([[launches[k] for k in own] for own in of_chunk], members, sharded, memory))
    for n, own in enumerate(of_chunk):
        exchange = exchanges.get(n)
        multiply = _each_alone([launches[k] for k in own]) if exchange is None else exchange.multiply
        found.append(Chunk(own, multiply, n, exchange))
    return found


def _each_alone(launches: Sequence[Launch]) -> Action:
    """Multiplies what each launch has."""
    stacks = []
    for launch in launches:
        memory, (rows, columns) = launch.table.operands, launch.table.matrix_shape
        assert memory is not None
        if not launch.table.is_absent:
            stack = memory.view(memory.numel() // max(1, rows * columns), rows, columns)
            stacks.append((launch.backend.orthogonalize(launch.table), stack))

    def multiply() -> None:
        for orthogonalize, stack in stacks:
            orthogonalize(stack)

    return multiply


def _exchanges(
    launches: Sequence[Sequence[Launch]], members: Sequence[Member], sharded: Sequence[Sequence[int]], memory: Operands
) -> Iterator[tuple[int, MatrixExchange]]:
    """Of the chunks whose matrices are in parts. Each mesh shares out the operations of all of its chunks."""
    by_mesh: dict[Any, list[int]] = {}
    for n, own in enumerate(sharded):
        whole: Any = members[own[0]].whole
        if is_exchanged(whole):
            by_mesh.setdefault(whole.device_mesh, []).append(n)
    for mesh, numbers in by_mesh.items():
        firsts = [members[sharded[n][0]] for n in numbers]
        costs = [operations(first.matrices, len(first.newton_schulz.coefficients)) for first in firsts]
        shapes = [(len(sharded[n]), first.matrices.depth) for n, first in zip(numbers, firsts, strict=True)]
        counts = [math.prod(shape) for shape in shapes]
        every = np.array(owners(np.repeat(costs, counts).tolist(), mesh.size()))
        parts: dict[Any, Parts] = {}
        for n, shape, owned in zip(numbers, shapes, np.split(every, np.cumsum(counts)[:-1]), strict=True):
            whole, tables = members[sharded[n][0]].whole, [launch.table for launch in launches[n]]
            known = whole.shape, whole.placements
            parts[known] = parts.get(known) or parts_of(whole)
            in_memory = [k for table in tables for k in table.member_indices.tolist()]
            absent = [table.operands for table in tables if table.is_absent and table.operands is not None]
            # as many for each, but neighbors together: then they are sent from where they are
            owner_of = np.sort(owned).reshape(shape)
            chunk = Shared(whole, parts[known], owner_of, memory.of_chunk[n], np.argsort(in_memory), absent)
            yield n, MatrixExchange(chunk, launches[n][0].backend.orthogonalize(tables[0]))
