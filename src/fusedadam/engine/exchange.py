"""Whole matrices from shards: each is multiplied by one process of the mesh, its owner.

The matrices of a batch have one shape and one sharding. Shapes are for a batch of 3 matrices of (1024, 64) on 4
processes with Shard(0), two of which the first process owns:

0. all-reduce  for float16 alone: the largest value of each matrix, which tells by what power of two it is multiplied
1. pack        the operands here, (3, 256, 64), in the dtype of the products and ordered by owner
2. all-to-all  each part to the owner of its matrix: the first process gets 4 times (2, 256, 64)
3. unpack      the matrices owned here, (2, 1024, 64), which the backend multiplies
4. the same way back

A batch is under way while the one before it is multiplied. It comes back while the one after it is multiplied or, for
float16, while the one after that is visited, since the all-reduce of that one waits for it.

Of several replicas of a part, the one beside the owner sends it (at the owner's coordinates of the dimensions that
replicate), and all of them get the result: replicas share the work. The layout depends on the parameters alone, not on
which of them have a gradient on this process: a process without gradients sends zeros, and no process waits in vain.
Nothing is sent for stacks of matrices that are sharded along the first dimension, as experts are. ``products.py``
forms the batches and chooses owners; ``launch.py`` says when each of these steps runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.backend import RunStage
from fusedadam.engine.geometry import Int64s
from fusedadam.engine.reduction import group_of
from fusedadam.tensors import matrices
from fusedadam.tensors.matrices import Matrices, matrices_of
from fusedadam.tensors.shards import held, sharding_of
from fusedadam.tensors.transfer import sent


def operations(matrices: Matrices, iterations: int) -> int:
    """Multiplications for one matrix. One element is never nothing: it has to be sent."""
    short, long = sorted(matrices[1:])
    return iterations * (2 * short * short * long + short**3) + short * long


def owners(costs: Sequence[int], count: int) -> list[int]:
    """One of ``count`` processes for each matrix: the most expensive ones first, each to the process that has the least
    to do so far."""
    loads = [(0, process) for process in range(count)]
    found = [0] * len(costs)
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        load, found[k] = loads[0]
        heapq.heapreplace(loads, (load + costs[k], found[k]))
    return found


def is_exchanged(param: Tensor) -> bool:
    """Whether processes have parts of the same matrix."""
    sharding = sharding_of(param)
    if sharding is None or param.numel() == 0 or param.dim() < 2:
        return False
    cut = [any(sharding.mesh.size(k) > 1 for k in own) for own in sharding.along]
    return any(cut[1:]) or (param.dim() != 3 and cut[0])


class Part(NamedTuple):
    """What a process has of each parameter of a batch: of which matrices of the stack, and where it is in a matrix, in
    runs of neighbors. For the second process of the example: (0,), (256, ..., 511) in runs of 64."""

    matrices: Int64s
    runs: Int64s
    replica: tuple[int, ...]  # the coordinates of the process along the dimensions of the mesh that replicate


class Parts(NamedTuple):
    """Of all processes of a group, by rank; ``run``: how many neighbors are sent as one."""

    of: list[Part]
    run: int


def parts_of(param: Any) -> Parts:
    import torch.distributed as dist

    mesh, group, columns = param.device_mesh, group_of(param.device_mesh), matrices_of(param.shape).columns
    at_rank = {int(mesh.mesh[at]): at for at in np.ndindex(*mesh.shape)}
    coordinates = [at_rank[dist.get_global_rank(group, rank)] for rank in range(group.size())]
    places = [_places(param, at) for at in coordinates]
    run = math.gcd(columns, *(border for _, _, inner in places for border in _borders(inner)))
    found = []
    for at, (stack, rows, inner) in zip(coordinates, places, strict=True):
        runs = (rows[:, None] * (columns // run) + inner[::run] // run).ravel()
        replica = tuple(c for c, placement in zip(at, param.placements, strict=True) if placement.is_replicate())
        found.append(Part(stack if len(runs) else stack[:0], runs, replica))
    return Parts(found, run)


def _places(param: Any, coordinates: Sequence[int]) -> tuple[Int64s, Int64s, Int64s]:
    """The matrices, rows and columns that the process at these coordinates has."""
    every = [held(param, dim, coordinates) for dim in range(param.dim())]
    indices = [those.numpy() for those in every if those is not None]
    if len(indices) < len(every):
        raise RuntimeError(
            f"a matrix of shape {tuple(param.shape)} is sharded in strides of different lengths, whose places torch "
            f"{torch.__version__} does not tell; choose sizes that the mesh divides evenly, or update torch"
        )
    if param.dim() == 3:
        return indices[0], indices[1], indices[2]
    columns = np.zeros(1, dtype=np.int64)
    for size, those in zip(param.shape[1:], indices[1:], strict=True):
        columns = (columns[:, None] * size + those).ravel()
    return np.zeros(1, dtype=np.int64), indices[0], columns


def _borders(indices: Int64s) -> list[int]:
    """Where runs of neighbors begin and end."""
    breaks = np.flatnonzero(np.diff(indices) != 1)
    ends = [*indices[breaks], *indices[-1:]]
    return [int(n) for n in (*indices[:1], *indices[breaks + 1], *(end + 1 for end in ends))]


class UnderWay(NamedTuple):
    """An all-to-all that has begun, and its memory."""

    work: Any
    received: Tensor
    sent: Tensor


class Route(NamedTuple):
    """One way of the exchange, in runs of neighbors: which are sent, in the order of the processes that get them, and
    where those received are, in the order of the memory that they go to. None: from the first on, as they are."""

    send: Tensor | None
    place: Tensor | None
    sent: list[int]  # runs to each process
    received: list[int]

    def begin(self, source: Tensor, run: int, group: Any) -> UnderWay:
        """``source`` may change afterwards."""
        import torch.distributed as dist

        runs = source.reshape(-1, run)
        out = runs[: sum(self.sent)].clone() if self.send is None else runs.index_select(0, self.send)
        received = runs.new_empty(sum(self.received), run)
        work = dist.all_to_all_single(received, out, self.received, self.sent, group, async_op=True)
        return UnderWay(work, received, out)

    def end(self, under_way: UnderWay) -> Tensor:
        under_way.work.wait()
        return under_way.received if self.place is None else under_way.received.index_select(0, self.place)


def _route(send: Sequence[Int64s], place: Sequence[Int64s], device: torch.device) -> Route:
    """``send`` and ``place``: for each process, the runs in the memory they come from and in the one they go to."""

    def unless_in_order(index: Int64s) -> Tensor | None:
        return None if np.array_equal(index, np.arange(len(index))) else sent(index, device)

    chosen, order = np.concatenate(send), np.argsort(np.concatenate(place))
    return Route(unless_in_order(chosen), unless_in_order(order), [*map(len, send)], [*map(len, place)])


class ExchangedBatch(NamedTuple):
    """A batch of parameters that are alike."""

    param: Any  # one of them
    parts: Parts
    owner_of: Int64s  # (parameters, matrices of each)
    memory: Tensor  # the operands that are here, one part for each parameter
    slots: Int64s  # which of the parts is the k-th parameter's
    absent: Sequence[Tensor]  # the parts without a gradient
    stack: Tensor  # for the whole matrices that are owned here; ``memory`` may be the same
    dtype: torch.dtype  # of the products, which is sent


class MatrixExchange:
    """Exchanges one batch: ``send`` its operands, ``multiply`` the matrices that this process owns, ``receive`` the
    results. Other batches use the same memory in between. ``orthogonalize`` replaces the stack of owned matrices."""

    def __init__(self, batch: ExchangedBatch, orthogonalize: RunStage) -> None:
        param, parts, owner_of, memory, slots, self._absent, self._stack, self._dtype = batch
        self._orthogonalize = orthogonalize
        mesh = param.device_mesh
        self.parts, self.owner_of, self.shape = parts, owner_of, matrices_of(param.shape)
        self._group, self._memory = group_of(mesh), memory
        self._mesh_device = memory.device if memory.device.type == mesh.device_type else torch.device(mesh.device_type)
        me, each = self._group.rank(), self.shape.rows * self.shape.columns // parts.run
        mine, numbers = parts.of[me], np.full(owner_of.shape, -1)
        owned = owner_of == me
        numbers[owned] = np.arange(owned.sum())
        here, there = [], []  # for each process: the runs that it owns in ``memory``, and those it has of what is owned
        for rank, part in enumerate(parts.of):
            k, i = np.nonzero(owner_of[:, mine.matrices] == rank)
            here.append(_expanded(slots[k] * len(mine.matrices) + i, len(mine.runs), np.arange(len(mine.runs))))
            of_part = numbers[:, part.matrices]
            there.append(_expanded(of_part[of_part >= 0], each, part.runs))
        self._back = _route(there, here, self._mesh_device)
        # for replicas at the owner's coordinates alone
        beside = [part.replica == mine.replica for part in parts.of]
        from_here, to_there = ([x if b else x[:0] for x, b in zip(xs, beside, strict=True)] for xs in (here, there))
        self._forth = _route(from_here, to_there, self._mesh_device)
        every = np.arange(owner_of.size).reshape(owner_of.shape)
        of_slots = every[np.argsort(slots)][:, mine.matrices].ravel()
        self._matrices_here, self._matrices_owned = (sent(n, memory.device) for n in (of_slots, every[owned]))
        self._operands = memory.view(len(of_slots), len(mine.runs) * parts.run)
        self._under_way: UnderWay | None = None
        self._of_owned: Tensor | None = None

    def bytes_sent(self) -> Int64s:
        """By each process to the others, both ways."""
        runs = np.zeros(len(self.parts.of), dtype=np.int64)
        for rank, part in enumerate(self.parts.of):
            owned = np.bincount(self.owner_of[:, part.matrices].ravel(), minlength=len(runs))
            owned[rank] = 0
            runs += owned * len(part.runs)  # by the owners
            beside = [other.replica == part.replica for other in self.parts.of]
            runs[rank] += owned[beside].sum() * len(part.runs)  # to them
        return runs * self.parts.run * self._dtype.itemsize

    def send(self) -> None:
        for part in self._absent:
            part.zero_()
        self._of_owned, here = self._shifts() if self._dtype == torch.float16 else (None, None)
        narrow = matrices.narrowed(self._operands, here, self._dtype).to(self._mesh_device)
        self._under_way = self._forth.begin(narrow, self.parts.run, self._group)

    def multiply(self) -> None:
        narrow = self._forth.end(self._taken()).to(self._memory.device)
        matrices.widen(narrow.view(self._stack.shape), self._of_owned, self._stack)
        self._orthogonalize(())
        result = self._stack.to(self._dtype).to(self._mesh_device)
        self._under_way = self._back.begin(result, self.parts.run, self._group)

    def receive(self) -> None:
        self._memory.copy_(self._back.end(self._taken()).view(-1))

    def _taken(self) -> UnderWay:
        """What is under way: its memory is not kept until the next step."""
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        return under_way

    def _shifts(self) -> tuple[Tensor, Tensor]:
        """Of the matrices owned here, and of the parts that are here, by the largest values of all processes."""
        import torch.distributed as dist

        largest = torch.zeros(self.owner_of.size, device=self._memory.device)
        largest[self._matrices_here] = matrices.largest(self._operands)
        largest = largest.to(self._mesh_device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        shifts = matrices.shifts_for(largest.to(self._memory.device))
        return shifts[self._matrices_owned], shifts[self._matrices_here]


def _expanded(items: Int64s, each: int, inside: Int64s) -> Int64s:
    """The places ``inside`` each of these items, which are ``each`` long."""
    expanded: Int64s = (items[:, None] * each + inside).ravel()
    return expanded
