"""Products of matrices between two rounds of a step: memory for their operands, and how many of them fit into it. So
here it is decided which members share a launch, also where none is multiplied.

Kernels store the operands as the parameters lie in memory, one after the other: a stack of matrices of one shape,
(matrices, rows, columns). A backend replaces each of them by its product, and kernels of the next round read the result
in the same place. Batches share the memory, one after the other.

A batch is one launch; or, of sharded matrices, the launches that have parts of them, whose order and size follow from
the parameters alone, so that all processes exchange the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.backend import RunStage
from fusedadam.engine.exchange import ExchangedBatch, MatrixExchange, Parts, is_exchanged, operations, owners, parts_of
from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Member
from fusedadam.engine.reduction import group_of
from fusedadam.formats import compute_dtype
from fusedadam.rules.orthogonal import product_dtype
from fusedadam.tensors.shards import local, sharding_of

if TYPE_CHECKING:
    from fusedadam.engine.launch import Launch

SMALLEST_LIMIT = 512 << 20  # bytes of memory for products that a step may take in any case
LARGEST_SHARE = 0.05  # the limit as a share of the parameters' memory, where that is more
ALIGNMENT = 256  # bytes
TORCHS_BYTES = 2 * (2 + 5)  # for each element, beside the operand: in 16 bits two copies, and five squares at most
BYTES_UNDER_WAY = 2 * 2 * 2  # one batch is sent and another one received, in 16 bits, with a copy on either side


class Memory(NamedTuple):
    """Of a launch, or of a batch that is exchanged. All of a device and dtype share it."""

    operands: Tensor | None = None
    scratch: Tensor | None = None  # bytes
    stack: Tensor | None = None  # for the whole matrices of a batch, in the same place as its operands


class Batch(NamedTuple):
    """``multiply`` replaces the operands of each launch, unless the matrices are exchanged."""

    launches: list[int]  # their numbers
    multiply: list[tuple[RunStage, int]]
    number: int | None = None  # among those of sharded matrices
    exchange: MatrixExchange | None = None


class ShardedBatch(NamedTuple):
    """Members whose matrices are sharded. ``owner_of``: (members, matrices of each), or None if each matrix is whole on
    some process."""

    members: list[int]
    owner_of: Int64s | None = None


class Products:
    """``members_of``: which members share a launch, for each; ``memory``: of each launch. ``batches`` are made when
    launches are."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members, self._sharded = members, sharded_batches(members)
        self._batch_of_member = {k: n for n, batch in enumerate(self._sharded) for k in batch.members}
        bytes_of_params = (m.roles["param"].numel() * m.roles["param"].element_size() for m in members)
        self._limit = _limit(sum(bytes_of_params))
        self.members_of = list(self._divided())
        self.memory, self._memory_of_batch = self._allotted()

    def batch_of(self, launch: int) -> int | None:
        """The number of the batch of sharded matrices that a launch belongs to."""
        return self._batch_of_member.get(self.members_of[launch][0])

    def batches(self, launches: Sequence[Launch]) -> list[Batch]:
        """In the order in which they are multiplied."""
        multiplying = [k for k, launch in enumerate(launches) if launch.product is not None]
        alone = [k for k in multiplying if self.batch_of(k) is None]
        found = [Batch([k], self._multiply_alone(launches, [k])) for k in alone]
        parts: dict[Any, Parts] = {}
        for n, batch in enumerate(self._sharded):
            own, first = [k for k in multiplying if self.batch_of(k) == n], self._members[batch.members[0]]
            if batch.owner_of is None:
                found.append(Batch(own, self._multiply_alone(launches, own), n))
                continue
            whole: Any = _of(first)
            key = whole.device_mesh, whole.shape, whole.placements
            parts[key] = parts.get(key) or parts_of(whole)
            tables = [launches[k].table for k in own]
            in_memory = [k for table in tables for k in table.member_indices.tolist()]
            absent = [table.operands for table in tables if table.is_absent and table.operands is not None]
            operands, scratch, stack = self._memory_of_batch[n]
            assert operands is not None
            assert scratch is not None
            assert stack is not None
            has_own = first.backend.scratch(first.matrices, operands.dtype, operands.device) is not None
            dtype = torch.float16 if has_own else product_dtype(operands)
            shared = ExchangedBatch(
                whole, parts[key], batch.owner_of, operands, np.argsort(in_memory), absent, stack, dtype
            )
            multiply = first.backend.prepare_orthogonalize(tables[0], stack, scratch)
            found.append(Batch(own, [], n, MatrixExchange(shared, multiply)))
        return found

    def _multiply_alone(self, launches: Sequence[Launch], own: Sequence[int]) -> list[tuple[RunStage, int]]:
        """Prepares the products of what each launch has, which needs no other process."""
        found = []
        for k in own:
            table, scratch = launches[k].table, self.memory[k].scratch
            if not table.is_absent and scratch is not None:
                found.append((launches[k].backend.prepare_orthogonalize(table, stack_of(table), scratch), k))
        return found

    def _divided(self) -> Iterator[list[int]]:
        """Members with the same launch key and batch. Others are divided where their matrices need more memory than a
        step may take."""
        by_key: dict[Any, list[int]] = {}
        for k, member in enumerate(self._members):
            by_key.setdefault((member.launch_key, self._batch_of_member.get(k)), []).append(k)
        for indices in by_key.values():
            launch, taken = list[int](), 0
            for k in indices:
                member = self._members[k]
                is_divided = _multiplies(member) and k not in self._batch_of_member
                needed = _count(member) * sum(_bytes(member)) if is_divided else 0
                if launch and taken + needed > self._limit:
                    yield launch
                    launch, taken = [], 0
                launch.append(k)
                taken += needed
            yield launch

    def _allotted(self) -> tuple[list[Memory], dict[int, Memory]]:
        """For each launch, and for each batch of sharded matrices, the memory of its operands and products. If there is
        more than fits into the limit, matrices are multiplied in parts. Members without a gradient have operands, too.

        Keys are numbers of batches of sharded matrices, and negative ones launches alone."""
        places: list[tuple[int, int, int]] = []
        ends: dict[int, int] = {}  # of the operands of each launch, or batch
        keys: dict[int, Member] = {}
        for number, indices in enumerate(self.members_of):
            first = self._members[indices[0]]
            key = self._batch_of_member.get(indices[0], -1 - number)
            begin = ends.get(key, 0)
            if _multiplies(first):
                keys[key] = first
                elements = sum(local(_of(self._members[k])).numel() for k in indices)
                ends[key] = begin + elements * _dtype(first).itemsize
            places.append((key, begin, ends.get(key, begin)))
        total: dict[tuple[torch.device, torch.dtype], int] = {}
        begins: dict[int, int] = {}  # of the scratch
        for key, first in keys.items():
            operand, scratch = _bytes(first)
            shares = key >= 0 and self._sharded[key].owner_of is not None
            count = self._owned(key) if shares else ends[key] // max(1, operand)
            begins[key] = _aligned(max(ends[key], count * operand))
            own = first.backend.scratch(first.matrices, _dtype(first), first.roles["param"].device) is not None
            at_once = min(count, max(1, (self._limit - count * operand) // max(1, scratch))) if own else 0
            of = first.roles["param"].device, _dtype(first)
            total[of] = max(total.get(of, 0), begins[key] + at_once * scratch)
        made = {of: torch.empty(nbytes, dtype=torch.uint8, device=of[0]) for of, nbytes in total.items()}

        def part(key: int, begin: int, end: int) -> Memory:
            if key not in keys:
                return Memory()
            first = keys[key]
            own = made[first.roles["param"].device, _dtype(first)]
            rows, columns = first.matrices[1:]
            count = self._owned(key) if key >= 0 else 0
            stack = own[: count * _bytes(first)[0]].view(_dtype(first)).view(count, rows, columns)
            return Memory(own[begin:end].view(_dtype(first)), own[begins[key] :], stack)

        return [part(*place) for place in places], {key: part(key, 0, ends[key]) for key in keys if key >= 0}

    def _owned(self, batch: int) -> int:
        """Matrices of a batch of which this process is the owner."""
        members, owner_of = self._sharded[batch]
        whole: Any = _of(self._members[members[0]])
        return 0 if owner_of is None else int((owner_of == group_of(whole.device_mesh).rank()).sum())


def sharded_batches(members: Sequence[Member]) -> list[ShardedBatch]:
    """In batches of one shape, sharding and method. Each mesh shares out the operations of all of its batches.

    All processes of a mesh have what is exchanged there, and its batches follow from that alone. Stacks of matrices
    that stay where they are take part only where they have gradients.
    """
    alike: dict[Any, list[int]] = {}
    for k, member in enumerate(members):
        whole: Any = member.whole
        if member.specialized.product is not None and whole is not None and sharding_of(whole) is not None:
            method = member.specialized.product.position, member.newton_schulz
            key = whole.device_mesh, whole.placements, whole.shape, local(whole).device.type
            alike.setdefault((*key, compute_dtype(whole.dtype), *method), []).append(k)
    sizes: dict[Any, int] = {}  # of what each mesh exchanges, on a process
    for member in (members[k] for own in alike.values() for k in own):
        whole = _of(member)
        if is_exchanged(whole):
            mesh = whole.device_mesh
            sizes[mesh] = sizes.get(mesh, 0) + _share(member) * whole.element_size()
    found = []
    for key, own in alike.items():
        first = members[own[0]]
        per_element = compute_dtype(_of(first).dtype).itemsize + TORCHS_BYTES + BYTES_UNDER_WAY
        # each process should have a matrix to multiply at a time
        limit = max(_limit(sizes.get(key[0], 0)) // per_element, _of(first).numel())
        count = max(1, limit // max(1, _share(first)))
        found += [ShardedBatch(own[begin : begin + count]) for begin in range(0, len(own), count)]
    return _with_owners(found, members)


def _with_owners(batches: list[ShardedBatch], members: Sequence[Member]) -> list[ShardedBatch]:
    by_mesh: dict[Any, list[int]] = {}
    for n, batch in enumerate(batches):
        whole: Any = _of(members[batch.members[0]])
        if is_exchanged(whole):
            by_mesh.setdefault(whole.device_mesh, []).append(n)
    for mesh, numbers in by_mesh.items():
        firsts = [members[batches[n].members[0]] for n in numbers]
        costs = [operations(first.matrices, len(first.newton_schulz.coefficients)) for first in firsts]
        shapes = [(len(batches[n].members), first.matrices.depth) for n, first in zip(numbers, firsts, strict=True)]
        counts = [math.prod(shape) for shape in shapes]
        every = np.array(owners(np.repeat(costs, counts).tolist(), mesh.size()))
        for n, shape, own in zip(numbers, shapes, np.split(every, np.cumsum(counts)[:-1]), strict=True):
            # sorted, so that neighbors have one owner, and are sent from where they lie
            batches[n] = ShardedBatch(batches[n].members, np.sort(own).reshape(shape))
    return batches


def _share(member: Member) -> int:
    """Elements on a process: on average, rounded up."""
    whole: Any = _of(member)
    sizes = zip(whole.device_mesh.shape, whole.placements, strict=True)
    shards: int = math.prod(size for size, placement in sizes if not placement.is_replicate())
    return -(-_of(member).numel() // shards)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _multiplies(member: Member) -> bool:
    return member.specialized.product is not None


def _limit(bytes_of_params: int) -> int:
    return max(SMALLEST_LIMIT, int(LARGEST_SHARE * bytes_of_params))


def _dtype(member: Member) -> torch.dtype:
    return compute_dtype(member.roles["param"].dtype)


def _of(member: Member) -> Tensor:
    return member.roles["param"] if member.whole is None else member.whole


def _count(member: Member) -> int:
    """Whole matrices that are here."""
    return int(local(_of(member)).numel() // max(1, member.matrices.rows * member.matrices.columns))


def _bytes(member: Member) -> tuple[int, int]:
    """Of one of its matrices: of the operand, and of what its product takes besides."""
    dtype, count = _dtype(member), member.matrices.rows * member.matrices.columns
    scratch = member.backend.scratch(member.matrices, dtype, member.roles["param"].device)
    return count * dtype.itemsize, count * TORCHS_BYTES if scratch is None else scratch


def stack_of(table: LaunchTable) -> Tensor:
    """The operands of a table, (matrices, rows, columns)."""
    assert table.operands is not None
    rows, columns = table.matrix_shape
    return table.operands.view(table.operands.numel() // max(1, rows * columns), rows, columns)
