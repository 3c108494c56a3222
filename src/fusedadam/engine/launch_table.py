"""What a launch works on: one column a tensor, and a row of 8-byte words for each thing that kernels ask about it.

The rows are, in this order: the scalars of this step, the addresses of the roles, what stays the same (sizes,
addresses of buffers), and the values by tensor that the stages compute. A table serves every parameter of one
(device, dtypes, flags), whatever its group: groups differ in scalars only. It holds numbers, not the tensors they
describe, so that it keeps none of them alive; what needs the tensors themselves (the eager backend, layouts that must
be copied) is handed them at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusedadam.rules.rule import OWN_SCALARS, Special
from fusedadam.rules.stages import Stage, Sum
from fusedadam.rules.sums import SEGMENT
from fusedadam.tensors.layout import address_of, dense_strides, is_plain, lies_as
from fusedadam.tensors.shards import Sharding
from fusedadam.tensors.storage import STORAGES, compute_dtype
from fusedadam.tensors.transfer import pinned, sent

Int64s: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Roles: TypeAlias = Mapping[str, Tensor]


class LaunchTable:
    """``members`` are the positions of the parameters served here, among all that take part in the step.

    Kernels read the words from ``on_device``, a tensor on ``home`` (the parameters' device, unless the backend keeps
    values on the host). ``at[name]`` is the row of a name.
    ``wholes``: the parameters of which ``roles`` are this process's part, if they are divided.
    ``absent``: this process has no gradients for them, and only learns of their sums. ``passing``: whose gradients are
    made anew for each run.
    """

    def __init__(
        self,
        special: Special,
        members: Sequence[int],
        roles: Sequence[Roles],
        on_host: bool,
        wholes: Sequence[Tensor] | None = None,
        shardings: Sequence[Sharding | None] | None = None,
        absent: bool = False,
        passing: Collection[int] = (),
    ) -> None:
        self.special, self.members = special, np.asarray(members, dtype=np.int64)
        mine = [roles[k] for k in members]
        params = [m["param"] for m in mine]
        self.shardings = [shardings[k] for k in members] if shardings else [None] * len(mine)
        self.mesh = None if self.shardings[0] is None else self.shardings[0].mesh
        self.is_split = special.by_rows and self.shardings[0] is not None and self.shardings[0].split
        self.device = params[0].device
        self.home = torch.device("cpu") if on_host else self.device
        if self.is_split and any(own is not None and own.strided for own in self.shardings):
            raise RuntimeError(
                "a DTensor's rows are divided, and also dealt out in strides; shard it along dimension 0 over one "
                "dimension of the mesh, or not at all"
            )
        compute = compute_dtype(params[0].dtype)
        self.compute = STORAGES[compute]
        self.storage = {r: STORAGES[mine[0][r].dtype] for r in special.roles}
        self.grad_scale: Tensor | None = None  # one float32 on the device: gradients are divided by it
        self.found_inf: Tensor | None = None  # one float32 on the device: unless it is 0, nothing is written
        self.before_scaling: list[Callable[[], object]] = []  # compiles what that needs, before anything is written
        self.strides = [dense_strides(p, special.by_rows) for p in params]
        self.copied = [
            (role, k)
            for role in special.roles
            for k, m in enumerate(mine)
            if not (lies_as(m[role], self.strides[k]) and is_plain(m[role]))
            or (role == "grad" and members[k] in passing)
        ]

        # the elements of a tensor are one row, unless the rule sums by rows
        self.sizes: Int64s = np.array([p.numel() for p in params], dtype=np.int64)
        full = self.sizes > 0
        self.rows: Int64s = np.array([p.shape[0] if special.by_rows and p.dim() else 1 for p in params]) * full
        self.widths: Int64s = self.sizes // np.maximum(self.rows, 1)
        self.pieces = -(-self.widths // SEGMENT["element"])
        # a process knows its own rows, or, where rows are divided, those of the whole parameter, its own among them
        self.firsts = np.array([own.first if own and self.is_split else 0 for own in self.shardings], dtype=np.int64)
        self.all_rows = self.rows
        if self.is_split:
            self.all_rows = np.array([own.rows if own else 0 for own in self.shardings], dtype=np.int64)
        self.segments = {"element": self.rows * self.pieces, "row": -(-self.all_rows // SEGMENT["row"])}
        static = {
            "_size": self.sizes, "_rows": self.rows, "_width": self.widths, "_pieces": self.pieces,
            "_segments": self.segments["element"], "_row_segments": self.segments["row"], "_all_rows": self.all_rows,
        }  # fmt: skip
        own = [s for s in special.scalars if s in OWN_SCALARS]
        self.scalars = [s for s in special.scalars if s not in OWN_SCALARS]
        whole = [wholes[k] for k in members] if wholes else params
        static |= {s: np.array([float(OWN_SCALARS[s](p)) for p in whole]).view(np.int64) for s in own}

        # whether a gradient is here, and, where parameters are divided, on how many processes there is one
        static |= {name: np.full(len(mine), float(not absent)).view(np.int64) for name in ("_joins", "_joined")}

        slots = 1 + max(special.row_slots.values(), default=-1)
        self.row_values = [torch.zeros(int(self.all_rows.sum()), dtype=compute, device=self.home) for _ in range(slots)]
        row_addresses = [_addresses(buffer, self.all_rows) for buffer in self.row_values]
        static |= {name: row_addresses[slot] for name, slot in special.row_slots.items()}
        static |= {f"_here_{name}": static[name] + compute.itemsize * self.firsts for name in special.row_slots}
        self.partials: dict[str, Tensor] = {}  # the sums of segments, where they are not yet the sums themselves
        for stage in special.stages:
            for one in stage.sums:
                if self.is_whole(one):
                    static[f"_part_{one.name}"] = static[f"_here_{one.name}"]
                    continue
                count, dtype = self.segments[one.of], compute if one.of == "element" else torch.float64
                buffer = torch.zeros(int(count.sum()), dtype=dtype, device=self.home)
                self.partials[one.name], static[f"_part_{one.name}"] = buffer, _addresses(buffer, count)

        names = [*self.scalars, *special.roles, *static, *special.values]
        self.at = {name: k for k, name in enumerate(names)}
        self.words: Int64s = np.zeros((len(names), len(mine)), dtype=np.int64)
        for role in special.roles:
            self.words[self.at[role]] = [address_of(m[role]) for m in mine]
        for name, row in static.items():
            self.words[self.at[name]] = row
        self.on_device = sent(self.words, self.home)  # on a CPU the very same memory
        self.numbers: Floats = self.words.view(np.float64)
        self.is_absent = absent
        self.moved = False  # addresses changed since they were last sent
        self.scalars_on_device = False  # they are made there, and not ours to send

    def is_whole(self, one: Sum) -> bool:
        """Whether each segment of this sum is a whole row, so that nothing is left to be combined."""
        return one.over == "row" and bool((self.pieces <= 1).all())

    def compute_of(self, stage: Stage) -> str:
        return self.compute if stage.space == "element" else "f64"

    def storage_of(self, stage: Stage) -> dict[str, str]:
        """How whatever a stage reads and writes is kept."""
        if stage.space == "tensor":
            return dict.fromkeys(stage.arrays, "f64")
        storage = self.storage | dict.fromkeys(self.special.row_slots, self.compute)
        for one in stage.sums:
            storage[f"_part_{one.name}"] = self.compute_of(stage)
        return storage | {one.name: "f64" for one in stage.sums if one.over == "tensor"}

    def place(self, addresses: Int64s) -> None:
        """New addresses (one line a role) for tensors that are otherwise what they were."""
        first = len(self.scalars)
        self.words[first : first + len(addresses)] = addresses
        self.moved = True

    def place_one(self, role: str, k: int, address: int) -> None:
        self.words[self.at[role], k] = address
        self.moved = True

    def set_scalars(self, scalars: Sequence[Mapping[str, Any]], whose: Int64s) -> None:
        """``scalars`` are those that differ; ``whose[k]`` says which of them are for the k-th parameter of all."""
        names = self.scalars
        columns = np.array([float(own[name]) for name in names for own in scalars]).reshape(len(names), len(scalars))
        self.numbers[: len(names)] = columns if len(scalars) == 1 else columns[:, whose[self.members]]

    def send(self) -> None:
        """Takes what changed on the host to the device, without waiting."""
        if self.home.type == "cpu":
            return
        scalars, roles = len(self.scalars), len(self.special.roles) if self.moved else 0
        rows = slice(scalars if self.scalars_on_device else 0, scalars + roles)
        if rows.stop > rows.start:
            self.on_device[rows].copy_(pinned(self.words[rows]), non_blocking=True)
        self.moved = False

    def value(self, name: str) -> Tensor:
        """A value by tensor, or a scalar: one for each member."""
        return self.on_device[self.at[name]].view(torch.float64)

    def entry(self, name: str, column: int) -> int:
        """The address of one word."""
        return self.on_device.data_ptr() + 8 * int(self.at[name] * len(self.sizes) + column)

    def lengths(self, stage: Stage) -> Int64s:
        """How long the segments of each tensor are, at most."""
        return np.minimum(self.widths if stage.space == "element" else self.all_rows, SEGMENT[stage.space])

    def chunks(self, stage: Stage, steps: Int64s, only: Any = True) -> tuple[Int64s, Int64s]:
        """The work of a stage in parts of so many ``steps`` (items, or segments if it goes by them)."""
        if stage.in_segments:
            return self.split(self.segments[stage.space] * only, steps)
        return self.split((self.sizes if stage.space == "element" else self.all_rows) * only, steps)

    def split(self, counts: Int64s, steps: Int64s) -> tuple[Int64s, Int64s]:
        """For each part its tensor, and which item or segment it begins with."""
        parts = -(-counts // steps)
        tensor = np.repeat(np.arange(len(parts)), parts)
        index = np.arange(len(tensor)) - np.repeat(np.cumsum(parts) - parts, parts)
        return tensor, index * steps[tensor]


def _addresses(buffer: Tensor, counts: Int64s) -> Int64s:
    """Where each tensor's part of a buffer begins."""
    addresses: Int64s = buffer.data_ptr() + buffer.element_size() * (np.cumsum(counts) - counts)
    return addresses
