"""What one launch works on: tensors as addresses, sizes and chunks, and a row of scalars for each.

A table serves every parameter of one (device, dtypes, flags), whatever its group: groups differ in rows only.
It holds numbers, not the tensors they describe, so that it keeps none of them alive; what needs the tensors
themselves (the eager backend, layouts that must be copied) is handed them at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fusedadam.layout import copy_with, dense_strides, lies_as
from fusedadam.rule import Special
from fusedadam.storage import STORAGES, compute_dtype

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Roles: TypeAlias = Mapping[str, Tensor]


class Backend(NamedTuple):
    """What runs a rule over a table. ``prepare`` compiles whatever is needed and returns the function that runs it."""

    prepare: Callable[[LaunchTable], Callable[[Sequence[Roles]], None]]
    needs_tensors: bool  # addresses alone are not enough


class LaunchTable:
    """``members`` are the positions of the parameters served here, among all that take part in the step."""

    def __init__(self, special: Special, members: Sequence[int], roles: Sequence[Roles]) -> None:
        self.special, self.members = special, np.asarray(members, dtype=np.int64)
        mine = [roles[k] for k in members]
        self.device = mine[0]["param"].device
        self.storage = {r: STORAGES[mine[0][r].dtype] for r in special.roles}
        self.compute = STORAGES[compute_dtype(mine[0]["param"].dtype)]
        self.sizes: Int64s = np.array([m["param"].numel() for m in mine], dtype=np.int64)
        self.addresses: Int64s = np.array([[m[r].data_ptr() for m in mine] for r in special.roles], dtype=np.int64)
        self.rows: Floats = np.zeros((len(special.scalars), len(mine)))
        self.grad_scale: Tensor | None = None  # one float32 on the device: gradients are divided by it
        self.found_inf: Tensor | None = None  # one float32 on the device: unless it is 0, nothing is written
        self.moved = True  # addresses changed since the backend last looked
        self.strides = [dense_strides(m["param"]) for m in mine]
        self.copied = [
            (row, k, role)
            for row, role in enumerate(special.roles)
            for k, m in enumerate(mine)
            if not lies_as(m[role], self.strides[k]) or m[role].is_neg()
        ]

    def place(self, addresses: Int64s) -> None:
        """New addresses (one line a role) for tensors that are otherwise what they were."""
        self.addresses[:] = addresses
        self.moved = True

    def set_scalars(self, scalars: Sequence[Mapping[str, Any]], whose: Int64s) -> None:
        """``scalars`` are those that differ; ``whose[k]`` says which of them are for the k-th parameter of all."""
        names = self.special.scalars
        columns = np.array([float(own[name]) for name in names for own in scalars]).reshape(len(names), len(scalars))
        self.rows[:] = columns if len(scalars) == 1 else columns[:, whose[self.members]]

    def chunks(self, chunk_size: int) -> tuple[Int32s, Int32s]:
        """For each chunk its tensor, and how many chunks of that tensor come before it."""
        counts = -(-self.sizes // chunk_size)
        tensor = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        index = np.arange(len(tensor)) - np.repeat(np.cumsum(counts) - counts, counts)
        return tensor, index.astype(np.int32)


class Launch:
    """A table and the backend's prepared kernel for it."""

    def __init__(self, table: LaunchTable, backend: Backend) -> None:
        self.table = table
        self._run = backend.prepare(table)
        self.needs_tensors = backend.needs_tensors or bool(table.copied)

    def run(self, roles: Sequence[Roles]) -> None:
        """``roles`` of all parameters that take part; read only if ``needs_tensors``."""
        mine = [roles[k] for k in self.table.members] if self.needs_tensors else []
        if not self.table.copied:
            self._run(mine)
            return
        mine = [dict(m) for m in mine]
        copies: list[tuple[str, Tensor, Tensor]] = []
        for row, k, role in self.table.copied:
            original = mine[k][role]
            mine[k][role] = copy = copy_with(original, self.table.strides[k])
            self.table.addresses[row, k] = copy.data_ptr()
            copies.append((role, original, copy))
        self.table.moved = True
        self._run(mine)
        for role, original, copy in copies:
            if role in self.table.special.outputs:
                original.copy_(copy)


def launches(specials: Sequence[Special], roles: Sequence[Roles], backends: Sequence[Backend]) -> list[Launch]:
    """One launch for each (device, dtypes, flags), with every kernel compiled: from here on nothing can fail."""
    members: dict[Any, list[int]] = {}
    for k, (special, own, backend) in enumerate(zip(specials, roles, backends, strict=True)):
        dtypes = tuple(own[r].dtype for r in special.roles)
        members.setdefault((own["param"].device, special, dtypes, backend), []).append(k)
    return [
        Launch(LaunchTable(special, indices, roles), backend) for (_, special, _, backend), indices in members.items()
    ]
