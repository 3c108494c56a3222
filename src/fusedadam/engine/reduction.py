"""Sums over sharded parameters: one all-reduce for all parameters of a mesh, at each position of a step that sums.

Each has three phases of communication:

1. pack: each process copies its local sums to their places in one float64 buffer, which is zero elsewhere
2. all-reduce: the buffers of all processes are added up (or their maximum is taken)
3. unpack: each process copies the results that it needs back to where its kernels read them

What is exchanged for a parameter of shape (1024, 64), on 4 processes:

    Shard(0)  local (256, 64)   rows are whole, and summed where they are: 1 number for each sum
    Shard(1)  local (1024, 16)  rows are sharded themselves: 1024 numbers, one at each row's place in the whole
                                parameter, and then every process knows all rows
    Shard(1), factored states   sums are over one dimension alone: the processes that share out a row exchange a number
                                for each of their rows, those that share out a column one for each of their columns

Of several replicas of a shard one contributes and the others send zeros, so that all processes of a mesh take part in
the same all-reduce and get the same bits. The layout of the buffer depends only on the parameters, not on which of them
have a gradient on this process: a process without gradients sends zeros, and no process waits in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch_table import GRADS_ANYWHERE, HAS_GRAD, LaunchTable
from fusedadam.rules.positions import Phase, Position
from fusedadam.rules.stages import Sum
from fusedadam.tensors.transfer import sent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReducedValues(NamedTuple):
    """Values to reduce, one parameter after the other. Shapes are for two with 3 and 5 rows, summed by row."""

    table: LaunchTable
    name: str
    memory: Tensor  # (8,), or larger: where the values are
    counts: Int64s  # (2,): how many values each parameter has, [3, 5]
    read: Int64s  # (8,): the places of the local values in ``memory``
    write: Int64s  # (8,): the places of the results in ``memory``
    over: tuple[int, ...] | None = None  # the dimensions of the mesh whose processes share the sums; None: all of them
    copies: Int64s | None = None  # as ``write``: which value goes to each place, if not one to each

    def contributed(self) -> Int64s:
        """Which of the values this process contributes: none where another replica does, and only local rows."""
        if self.over is not None:
            has_any = np.repeat(self.table.rows > 0, self.counts)
            return np.flatnonzero(has_any)
        chosen, begin = [np.zeros(0, dtype=np.int64)], 0
        for k, (sharding, count) in enumerate(zip(self.table.shardings, self.counts.tolist(), strict=True)):
            assert sharding is not None
            if sharding.contributes_rows if self.table.is_factored else sharding.contributes:
                by_row = self.counts is self.table.all_rows
                contributed = sharding.first_row + np.arange(self.table.rows[k]) if by_row else np.arange(count)
                chosen.append(begin + contributed)
            begin += count
        return np.concatenate(chosen)


class Packing(NamedTuple):
    """Phases 1 and 3 for one memory: ``buffer[read_places] = memory[read]``, and after the all-reduce
    ``memory[write] = buffer[write_places]``. Shapes are for 8 values, of which this process contributes 3."""

    memory: Tensor  # (8,), or larger
    read: Tensor  # (3,), where ``memory`` is
    read_places: Tensor  # (3,), where the buffer is
    write: Tensor  # (8,), where ``memory`` is
    write_places: Tensor  # (8,), where the buffer is


class Reduction:
    """The three phases, after ``position``: one all-reduce over all processes of a mesh, or one after the other along
    each of the mesh's dimensions ``over``. ``batch``: whose products of matrices it comes with or after."""

    def __init__(
        self, position: Position, batch: int | None, mesh: DeviceMesh, over: tuple[int, ...] | None, largest: bool,
        reduced: Sequence[ReducedValues],
    ) -> None:  # fmt: skip
        self.position, self.batch, self._largest = position, batch, largest
        self._groups = [group_of(mesh)] if over is None else [mesh.get_group(k) for k in over]
        # ordered by parameter, since processes may have different tables
        sizes: dict[tuple[int, str], int] = {}
        for values in reduced:
            names = [(k, values.name) for k in values.table.member_indices.tolist()]
            sizes |= dict(zip(names, values.counts.tolist(), strict=True))
        ends = np.cumsum([sizes[key] for key in sorted(sizes)]).tolist()
        begins = {key: end - sizes[key] for key, end in zip(sorted(sizes), ends, strict=True)}
        home, mesh_device = reduced[0].table.home, torch.device(mesh.device_type)
        self._sums = torch.zeros(ends[-1], dtype=torch.float64, device=home)
        on_mesh = home.type == mesh_device.type
        self._buffer = self._sums if on_mesh else torch.empty_like(self._sums, device=mesh_device)
        memories = {values.memory.data_ptr(): values.memory for values in reduced}
        self._packings = [
            self._packing(memory, [values for values in reduced if values.memory.data_ptr() == address], begins)
            for address, memory in memories.items()
        ]

    @property
    def bytes(self) -> int:
        """The size of the all-reduce: the bytes that each process contributes."""
        return self._sums.numel() * self._sums.element_size()

    def run(self) -> None:
        import torch.distributed as dist

        sums = self._sums.zero_()
        for packing in self._packings:  # 1. pack
            sums[packing.read_places] = packing.memory[packing.read].to(sums.device, sums.dtype)
        buffer = sums if self._buffer is sums else self._buffer.copy_(sums)
        for group in self._groups:  # 2. all-reduce
            if self._largest:  # as integers: non-negative floats have the order of their bits, with NaN above infinity
                dist.all_reduce(buffer.abs_().view(torch.int64), op=dist.ReduceOp.MAX, group=group)
            else:
                dist.all_reduce(buffer, group=group)
        if buffer is not sums:
            sums.copy_(buffer)
        for packing in self._packings:  # 3. unpack
            memory = packing.memory
            memory[packing.write] = sums[packing.write_places].to(memory.device, memory.dtype)

    def _packing(self, memory: Tensor, reduced: Sequence[ReducedValues], begins: dict[tuple[int, str], int]) -> Packing:
        read, read_places, write, write_places = [], [], [], []
        for values in reduced:
            pairs = zip(values.table.member_indices.tolist(), values.counts.tolist(), strict=True)
            places = np.concatenate([begins[member, values.name] + np.arange(count) for member, count in pairs])
            chosen = values.contributed()
            read.append(values.read[chosen])
            read_places.append(places[chosen])
            write.append(values.write)
            write_places.append(places if values.copies is None else places[values.copies])
        devices = (memory.device, self._sums.device) * 2
        arrays = (np.concatenate(each) for each in (read, read_places, write, write_places))
        return Packing(memory, *(sent(array, device) for array, device in zip(arrays, devices, strict=True)))


def reductions(tables: Sequence[LaunchTable]) -> list[Reduction]:
    """The reductions of a step, in an order that is the same on every process."""
    found: dict[tuple[Position, int | None, bool, DeviceMesh, tuple[int, ...] | None], list[ReducedValues]] = {}
    begun: set[int] = set()
    for position, largest, values in sorted(_reduced_values(tables), key=lambda item: item[0]):
        mesh = values.table.mesh
        assert mesh is not None
        product = values.table.specialized.product
        batch = values.table.batch if product is not None and position >= product.position else None
        together = found.setdefault((position, batch, largest, mesh, values.over), [])
        # the first reduction of a table also counts the processes that have a gradient
        if values.over is None and id(values.table) not in begun:
            begun.add(id(values.table))
            together.append(_by_tensor(values.table, HAS_GRAD, GRADS_ANYWHERE))
        together.append(values)

    def order(item: tuple[Any, list[ReducedValues]]) -> tuple[Position, int, bool, tuple[int, ...]]:
        (position, _, largest, _, over), reduced = item
        return position, min(int(values.table.member_indices.min()) for values in reduced), largest, over or ()

    return [
        Reduction(position, batch, mesh, over, largest, reduced)
        for (position, batch, largest, mesh, over), reduced in sorted(found.items(), key=order)
    ]


def _reduced_values(tables: Sequence[LaunchTable]) -> Iterator[tuple[Position, bool, ReducedValues]]:
    for table in tables:
        for stage in table.specialized.stages:
            if table.is_factored and table.mesh is not None:
                yield from _factored(table, (*stage.sums, *stage.matrix_sums))
            for summation in stage.sums:
                # after this phase whole rows have been decided about; sharded rows wait for the other processes
                when = max(summation.position, Position(summation.position.round, Phase.ROW))
                if table.splits_rows and summation.over == "row":
                    rows = np.arange(table.all_rows.sum())
                    memory = table.buffer_of(summation.name)
                    values = ReducedValues(table, summation.name, memory, table.all_rows, rows, rows)
                    yield when, summation.largest, values
                elif table.mesh is not None and not table.splits_rows and summation.over == "tensor":
                    yield when, summation.largest, _by_tensor(table, summation.name, summation.name)


def _factored(table: LaunchTable, sums: Sequence[Sum]) -> Iterator[tuple[Position, bool, ReducedValues]]:
    """The sums over one dimension of a parameter that is sharded along it."""
    sharding = table.shardings[0]
    assert sharding is not None
    in_row, in_column = sharding.by_row_and_column
    for summation in sums:
        over = {"row": in_row, "column": in_column, "matrix": in_column}.get(summation.over, ())
        if not over:
            continue
        memory, counts, copies = table.buffer_of(summation.name), table.counts(summation.space), None
        read = write = np.arange(counts.sum())
        if summation.over == "matrix":  # each row has it, and one of them is enough
            per_member = zip(table.matrices.tolist(), table.heights.tolist(), strict=True)
            every = [np.repeat(np.arange(n), height) for n, height in per_member]
            begins = np.cumsum(table.matrices) - table.matrices
            copies = np.concatenate([begin + places for begin, places in zip(begins, every, strict=True)])
            counts = table.matrices
            first_rows = np.zeros(int(counts.sum()), dtype=np.int64)
            first_rows[copies[::-1]] = write[::-1]
            read = first_rows
        yield (
            summation.position,
            summation.largest,
            ReducedValues(table, summation.name, memory, counts, read, write, over, copies),
        )


def _by_tensor(table: LaunchTable, term: str, result: str) -> ReducedValues:
    tensors = len(table.sizes)
    read, write = (table.fields[name] * tensors + np.arange(tensors) for name in (term, result))
    memory = table.on_device.view(-1).view(torch.float64)
    return ReducedValues(table, result, memory, np.ones_like(table.sizes), read, write)


def group_of(mesh: DeviceMesh) -> Any:
    """The process group of all processes of a mesh, which may have several dimensions."""
    import torch.distributed as dist

    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
