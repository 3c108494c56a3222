"""Sums over parameters that are divided among processes: one all-reduce a round, for all parameters of a mesh.

Rows that are whole somewhere (Shard(0)) are summed up there, and one number a parameter and sum travels. Rows that are
divided (Shard(1)) travel themselves, one number a row and sum, each at its place among all rows of the parameter; from
then on every process knows them all. Of processes that hold the same part, one contributes and the others send zeros,
so that all processes of a mesh take part in the same operation and end with the same bits.

The layout of what travels depends on the parameters alone, never on which of them have a gradient here: a process
without gradients takes part with zeros, and nobody waits for it in vain.
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
from fusedadam.tensors.transfer import sent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Wanted(NamedTuple):
    """Values that are to be added up: ``counts[k]`` of them for the table's k-th parameter, one parameter after the
    other, at ``read`` in a memory that has other things as well; the sums go to ``write``."""

    table: LaunchTable
    name: str
    memory: Tensor
    counts: Int64s
    read: Int64s
    write: Int64s

    def contributed(self) -> Int64s:
        """Which of them this process contributes: those that no other process does, too, and of rows its own."""
        chosen, begin = [np.zeros(0, dtype=np.int64)], 0
        for k, (sharding, count) in enumerate(zip(self.table.shardings, self.counts.tolist(), strict=True)):
            assert sharding is not None
            if sharding.counts:
                by_row = self.counts is self.table.all_rows
                own = sharding.first + np.arange(self.table.rows[k]) if by_row else np.arange(count)
                chosen.append(begin + own)
            begin += count
        return np.concatenate(chosen)


class Exchange(NamedTuple):
    """What ``memory`` has at ``read`` is put at ``read_places``; the sums at ``write_places`` go to ``write``."""

    memory: Tensor
    read: Tensor
    read_places: Tensor
    write: Tensor
    write_places: Tensor


class Reduction:
    """One all-reduce over the processes of a mesh, after ``position``."""

    def __init__(self, position: Position, mesh: DeviceMesh, largest: bool, wanted: Sequence[Wanted]) -> None:
        self.position, self._largest, self._group = position, largest, group_of(mesh)
        # parameter by parameter: which tables they are in may differ between processes
        sizes: dict[tuple[int, str], int] = {}
        for one in wanted:
            names = [(k, one.name) for k in one.table.members.tolist()]
            sizes |= dict(zip(names, one.counts.tolist(), strict=True))
        ends = np.cumsum([sizes[key] for key in sorted(sizes)]).tolist()
        begins = {key: end - sizes[key] for key, end in zip(sorted(sizes), ends, strict=True)}
        home, there = wanted[0].table.home, torch.device(mesh.device_type)
        self._sums = torch.zeros(ends[-1], dtype=torch.float64, device=home)
        self._travelling = self._sums if home.type == there.type else torch.empty_like(self._sums, device=there)
        memories = {one.memory.data_ptr(): one.memory for one in wanted}
        self._exchanges = [
            self._exchange(memory, [one for one in wanted if one.memory.data_ptr() == address], begins)
            for address, memory in memories.items()
        ]

    @property
    def bytes(self) -> int:
        """What each process contributes."""
        return self._sums.numel() * self._sums.element_size()

    def run(self) -> None:
        import torch.distributed as dist

        sums = self._sums.zero_()
        for own in self._exchanges:
            sums[own.read_places] = own.memory[own.read].to(sums.device, sums.dtype)
        buffer = sums if self._travelling is sums else self._travelling.copy_(sums)
        if self._largest:  # none is negative: their bits have their order, in which NaN is above infinity
            dist.all_reduce(buffer.abs_().view(torch.int64), op=dist.ReduceOp.MAX, group=self._group)
        else:
            dist.all_reduce(buffer, group=self._group)
        if buffer is not sums:
            sums.copy_(buffer)
        for own in self._exchanges:
            own.memory[own.write] = sums[own.write_places].to(own.memory.device, own.memory.dtype)

    def _exchange(self, memory: Tensor, wanted: Sequence[Wanted], begins: dict[tuple[int, str], int]) -> Exchange:
        read, read_places, write, write_places = [], [], [], []
        for one in wanted:
            pairs = zip(one.table.members.tolist(), one.counts.tolist(), strict=True)
            places = np.concatenate([begins[member, one.name] + np.arange(count) for member, count in pairs])
            chosen = one.contributed()
            read.append(one.read[chosen])
            read_places.append(places[chosen])
            write.append(one.write)
            write_places.append(places)
        devices = (memory.device, self._sums.device) * 2
        arrays = (np.concatenate(each) for each in (read, read_places, write, write_places))
        return Exchange(memory, *(sent(array, device) for array, device in zip(arrays, devices, strict=True)))


def reductions(tables: Sequence[LaunchTable]) -> list[Reduction]:
    """All that a step needs, in the order in which every process runs them."""
    found: dict[tuple[Position, bool, DeviceMesh], list[Wanted]] = {}
    begun: set[int] = set()
    for position, largest, wanted in sorted(_wanted(tables), key=lambda one: one[0]):
        mesh = wanted.table.mesh
        assert mesh is not None
        own = found.setdefault((position, largest, mesh), [])
        if id(wanted.table) not in begun:  # how many processes have a gradient is learned on the way
            begun.add(id(wanted.table))
            own.append(_by_tensor(wanted.table, HAS_GRAD, GRADS_ANYWHERE))
        own.append(wanted)

    def order(one: tuple[Any, list[Wanted]]) -> tuple[Position, int, bool]:
        (position, largest, _), wanted = one
        return position, min(int(w.table.members.min()) for w in wanted), largest

    return [
        Reduction(position, mesh, largest, wanted)
        for (position, largest, mesh), wanted in sorted(found.items(), key=order)
    ]


def _wanted(tables: Sequence[LaunchTable]) -> Iterator[tuple[Position, bool, Wanted]]:
    for table in tables:
        for stage in table.special.stages:
            for one in stage.sums:
                # after this phase whole rows have been decided about; sharded rows wait for the other processes
                when = max(one.position, Position(one.position.round, Phase.ROW))
                if table.is_split and one.over == "row":
                    rows = np.arange(table.all_rows.sum())
                    memory = table.row_values[table.special.row_slots[one.name]]
                    yield when, one.largest, Wanted(table, one.name, memory, table.all_rows, rows, rows)
                elif table.mesh is not None and not table.is_split and one.over == "tensor":
                    yield when, one.largest, _by_tensor(table, one.name, one.name)


def _by_tensor(table: LaunchTable, term: str, result: str) -> Wanted:
    tensors = len(table.sizes)
    read, write = (table.at[name] * tensors + np.arange(tensors) for name in (term, result))
    return Wanted(table, result, table.on_device.view(-1).view(torch.float64), np.ones_like(table.sizes), read, write)


def group_of(mesh: DeviceMesh) -> Any:
    """The processes of a mesh of whatever dimensions."""
    import torch.distributed as dist

    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
