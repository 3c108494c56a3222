"""What a launch works on: one column for each member, one field for each thing that kernels ask about it.

A field is an 8-byte word for each member. The fields are, in this order: the scalars of this step, the addresses of
the roles' arrays (one, unless a role's format has several), what stays the same (sizes, addresses of buffers), and the
values by tensor that the stages compute. A table serves all members of a launch, in any group: groups differ in scalars
only. It holds numbers, not the tensors they describe, so that it keeps none of them alive. Code that needs the tensors
themselves (the eager backend, layouts that must be copied) is handed them at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedadam.engine.geometry import Floats, Geometry, Int64s
from fusedadam.engine.member import Member
from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS, compute_dtype
from fusedadam.formats.noise import seed_word
from fusedadam.rules.rule import PARAM_SCALARS
from fusedadam.rules.stages import Stage, Sum
from fusedadam.tensors.host_memory import slab_of
from fusedadam.tensors.layout import address_of, has_strides, is_plain, row_major_strides
from fusedadam.tensors.shards import INDEX_FIELDS, IndexMap
from fusedadam.tensors.transfer import sent, update

# The fields of sums and of values by row have these names before the value's own, in tables and in generated kernels.
PARTIAL = "_part_"  # where the sums of segments are kept until they are combined
HERE = "_here_"  # the address of the first row that this process has elements of
STEP, SEED = "_step", "_seed"  # of the noise of stochastic rounding: integers
HAS_GRAD, GRADS_ANYWHERE = "_has_grad", "_grads_anywhere"  # is there a gradient here? on how many processes?


class LaunchTable(Geometry):
    """``indices``: which of ``all_members`` are served here, those with the same launch key.

    Kernels read the words from ``on_device``, a tensor on ``home`` (the parameters' device, unless the backend keeps
    values on the host). ``fields[name]`` is the position of a field. ``operands``: memory for products of matrices, one
    number for each element; ``batch``: which of the batches of sharded matrices they are in.
    """

    def __init__(
        self, indices: Sequence[int], all_members: Sequence[Member], operands: Tensor | None = None,
        batch: int | None = None,
    ) -> None:  # fmt: skip
        members = [all_members[k] for k in indices]
        super().__init__(members)
        self.member_indices = np.asarray(indices, dtype=np.int64)
        self.specialized, self.is_absent = members[0].specialized, members[0].is_absent
        self.operands, self.newton_schulz, self.batch = operands, members[0].newton_schulz, batch
        self.matrix_shape = (0, 0) if operands is None else members[0].matrices[1:]
        self.shardings = [member.sharding for member in members]
        self.mesh = None if self.shardings[0] is None else self.shardings[0].mesh
        self.device = members[0].roles["param"].device
        self.backend = members[0].backend
        self.over_the_bus = any(member.over_the_bus for member in members)
        self.beside_model = members[0].beside_model
        self.home = torch.device("cpu") if self.backend.needs_tensors else self.device
        self._check_rows_can_be_split()
        self._compute = compute_dtype(members[0].roles["param"].dtype)
        self.compute = FORMAT_OF_DTYPE[self._compute]
        self.formats = members[0].formats
        self.arrays = {
            name: (role, array)
            for role in self.specialized.roles
            for name, array in FORMATS[self.formats[role]].arrays_of(role).items()
        }
        self.strides = [member.strides for member in members]
        self.index_maps = [member.index_map or IndexMap() for member in members]
        self.is_stochastic = members[0].index_map is not None
        self.copied = list(self._roles_to_copy(members))
        self._make_buffers()
        self.scalars = [s for s in self.specialized.scalars if s not in PARAM_SCALARS]
        self._make_words(members)
        # set for each run
        self.grad_scale: Tensor | None = None  # one float32 on the device: gradients are divided by it
        self.found_inf: Tensor | None = None  # one float32 on the device: unless it is 0, nothing is written
        self.compile_scaled: list[Callable[[], object]] = []  # kernels for scaled gradients that are not compiled yet
        self.moved = False  # addresses changed since they were last sent
        self.scalars_on_device = False  # the device computes them, and the host has none to send

    def _check_rows_can_be_split(self) -> None:
        if self.splits_rows and any(sharding is not None and sharding.strided for sharding in self.shardings):
            raise RuntimeError(
                "a DTensor's rows are sharded, and also dealt out in strides; shard it along dimension 0 over one "
                "dimension of the mesh, or not at all"
            )

    def _roles_to_copy(self, members: Sequence[Member]) -> Iterator[tuple[str, int]]:
        """(array, member) of the tensors that kernels cannot walk in place: each run works on a copy."""
        for name in self.arrays:
            for k, member in enumerate(members):
                tensor = member.roles[name]
                in_place = has_strides(tensor, self.strides_of(name, k, tensor)) and is_plain(tensor)
                if not in_place or (name == "grad" and member.resolves_grad):
                    assert slab_of(tensor) is None, f"{name}: kernels do not reach a copy of what is in host memory"
                    yield name, k

    def strides_of(self, name: str, k: int, tensor: Tensor) -> tuple[int, ...]:
        """The strides that kernels expect of an array, which is ``tensor``."""
        role, array = self.arrays[name]
        by_element = array.by == "element" and self.specialized.rule.spaces[role] == "element"
        return self.strides[k] if by_element else row_major_strides(tensor)

    def is_written(self, name: str) -> bool:
        """Scaled gradients are written back, unscaled."""
        if name == "grad":
            return self.grad_scale is not None
        return self.arrays[name][0] in self.specialized.outputs

    def _make_buffers(self) -> None:
        """Memory for values by row, and for the sums of segments where a segment is not yet the whole sum."""
        rows, columns = int(self.all_rows.sum()), int(self.columns.sum()) if self.is_factored else 0
        self.row_buffers = self._buffers(self.specialized.row_buffer_of, rows)
        self.column_buffers = self._buffers(self.specialized.column_buffer_of, columns)
        self.partials: dict[str, Tensor] = {}
        for summation in self._sums:
            if self.needs_combining(summation):
                dtype = self._compute if summation.of == "element" else torch.float64
                count = int(self.segment_counts(summation).sum())
                self.partials[summation.name] = torch.zeros(count, dtype=dtype, device=self.home)

    def _buffers(self, buffer_of: Mapping[str, int], length: int) -> list[Tensor]:
        count = 1 + max(buffer_of.values(), default=-1)
        return [torch.zeros(length, dtype=self._compute, device=self.home) for _ in range(count)]

    def buffer_of(self, name: str) -> Tensor:
        """Where a value by row, or by column, is kept, for all members."""
        by_row, by_column = self.specialized.row_buffer_of, self.specialized.column_buffer_of
        return self.row_buffers[by_row[name]] if name in by_row else self.column_buffers[by_column[name]]

    def _make_words(self, members: Sequence[Member]) -> None:
        unchanging = self._unchanging(members)
        names = [*self.scalars, *([STEP] if self.is_stochastic else []), *self.arrays, *unchanging]
        names += self.specialized.values
        self.fields = {name: k for k, name in enumerate(names)}
        self.words: Int64s = np.zeros((len(names), len(members)), dtype=np.int64)
        for name in self.arrays:
            self.words[self.fields[name]] = [address_of(member.roles[name]) for member in members]
        for name, values in unchanging.items():
            self.words[self.fields[name]] = values
        self.on_device = sent(self.words, self.home)  # on a CPU the very same memory
        self.numbers: Floats = self.words.view(np.float64)

    def _unchanging(self, members: Sequence[Member]) -> dict[str, Int64s]:
        """The fields that stay the same from step to step."""
        table = {
            "_size": self.sizes, "_rows": self.rows, "_width": self.widths, "_pieces": self.pieces,
            "_segments": self.segments["element"], "_row_segments": self.segments["row"], "_all_rows": self.all_rows,
        }  # fmt: skip
        wholes = [member.roles["param"] if member.whole is None else member.whole for member in members]
        dtypes = [w.dtype if m.is_plain else torch.float32 for m, w in zip(members, wholes, strict=True)]
        for name in self.specialized.scalars:
            if name in PARAM_SCALARS:
                values = map(PARAM_SCALARS[name], wholes, dtypes)
                table[name] = np.array([*values], dtype=np.float64).view(np.int64)
        if self.is_stochastic:
            table[SEED] = np.array([seed_word(member.seed) for member in members], dtype=np.int64)
            indices = np.array(self.index_maps, dtype=np.int64).reshape(len(members), -1)
            one_run = all(mapped.is_one_run for mapped in self.index_maps)
            table |= dict(zip(INDEX_FIELDS[: 1 if one_run else None], indices.T, strict=False))
        for name in (HAS_GRAD, GRADS_ANYWHERE):
            table[name] = np.full(len(members), float(not self.is_absent)).view(np.int64)
        begins = [_begins(buffer, self.all_rows) for buffer in self.row_buffers]
        table |= {name: begins[buffer] for name, buffer in self.specialized.row_buffer_of.items()}
        table |= {
            HERE + name: table[name] + self._compute.itemsize * self.first_rows
            for name in self.specialized.row_buffer_of
        }
        if self.is_factored:
            table |= {"_height": self.heights, "_column_segments": self.column_segments, "_matrices": self.matrices}
            table["_columns"] = self.columns
        if self.specialized.product is not None and self.operands is not None:
            table[self.specialized.product.name] = _begins(self.operands, self.sizes)
        begins = [_begins(buffer, self.columns) for buffer in self.column_buffers]
        table |= {name: begins[buffer] for name, buffer in self.specialized.column_buffer_of.items()}
        for summation in self._sums:
            partial = self.partials.get(summation.name)
            result = summation.name if summation.over == "column" else HERE + summation.name
            table[PARTIAL + summation.name] = (
                table[result] if partial is None else _begins(partial, self.segment_counts(summation))
            )
        return table

    @property
    def _sums(self) -> list[Sum]:
        return [s for stage in self.specialized.stages for s in stage.sums]

    def compute_of(self, stage: Stage) -> str:
        return self.compute if stage.space == "element" else "f64"

    def formats_of(self, stage: Stage) -> dict[str, str]:
        """The format of everything that a stage reads and writes."""
        if stage.space == "tensor":
            return {name: self.formats.get(name, "f64") for name in stage.arrays}
        buffers = (*self.specialized.row_buffer_of, *self.specialized.column_buffer_of)
        formats = self.formats | dict.fromkeys(buffers, self.compute)
        if self.specialized.product is not None:
            formats[self.specialized.product.name] = self.compute
        for summation in stage.sums:
            formats[PARTIAL + summation.name] = self.compute_of(stage)
        return formats | {s.name: "f64" for s in stage.sums if s.over == "tensor"}

    def place(self, addresses: Int64s) -> None:
        """New addresses (one field for each of ``arrays``) of tensors that are otherwise unchanged."""
        first = self.fields[next(iter(self.arrays))]
        self.words[first : first + len(addresses)] = addresses
        self.moved = True

    def place_one(self, role: str, k: int, address: int) -> None:
        self.words[self.fields[role], k] = address
        self.moved = True

    def set_scalars(self, scalars: Sequence[Mapping[str, Any]], set_of: Int64s) -> None:
        """``scalars`` are the sets that differ; ``set_of[k]`` is the set of the k-th of all members."""
        shape = len(self.scalars), len(scalars)
        values = np.array([float(numbers[name]) for name in self.scalars for numbers in scalars]).reshape(shape)
        self.numbers[: len(self.scalars)] = values if len(scalars) == 1 else values[:, set_of[self.member_indices]]

    def set_steps(self, steps: Floats) -> None:
        """The number of each member's step, which the noise of stochastic rounding depends on."""
        self.words[self.fields[STEP]] = steps

    def send(self) -> None:
        """Takes what changed on the host to the device, without waiting."""
        if self.home.type == "cpu":
            return
        scalars, arrays = len(self.scalars) + self.is_stochastic, len(self.arrays) if self.moved else 0
        changed = slice(scalars if self.scalars_on_device else 0, scalars + arrays)
        if changed.stop > changed.start:
            update(self.on_device, self.words, changed)
        self.moved = False

    def value(self, name: str) -> Tensor:
        """A value by tensor, or a scalar: one for each member."""
        return self.on_device[self.fields[name]].view(torch.float64)

    def entry(self, name: str, column: int) -> int:
        """The address of one word."""
        return self.on_device.data_ptr() + 8 * int(self.fields[name] * len(self) + column)


def _begins(buffer: Tensor, counts: Int64s) -> Int64s:
    """The address at which each member's part of a buffer begins."""
    addresses: Int64s = buffer.data_ptr() + buffer.element_size() * (np.cumsum(counts) - counts)
    return addresses
