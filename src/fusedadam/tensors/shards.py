"""Sharded tensors (torch's DTensor): the local shard, and how a parameter is sharded.

Kernels only see the local shard. For rules that sum, reduction.py reduces the sums over the processes.

Shapes in docstrings are those of the last of 4 processes, for a parameter of shape (1000, 64): its local shard is
(250, 64) with Shard(0), and (1000, 16) with Shard(1).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusedadam import compat
from fusedadam.tensors.layout import PER_BLOCK, block_shape, is_channels_last

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: Any) -> bool:
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and while nobody has, there are no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def is_partial(tensor: Any) -> bool:
    """Whether each process has one term of a sum, so that the tensor has no value yet."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def local(tensor: Any) -> Any:
    """The local shard of a DTensor, (250, 64) of (1000, 64); any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    shard = tensor._local_tensor
    return shard if type(shard) is Tensor or not hasattr(shard, "trigger_wait") else shard.trigger_wait()


def memory_of(tensor: Any) -> tuple[Any, ...]:
    """A key that is equal for tensors which are the same view of the same local memory."""
    shard = local(tensor)
    if shard.layout != torch.strided or shard.is_nested or is_lazy(shard):
        return (id(shard),)
    # what has no elements has no address either, but still a storage of its own
    address = shard.data_ptr() if shard.numel() else shard.untyped_storage()._cdata
    return shard.device, address, shard.dtype, shard.shape, shard.stride()


def is_sharded_like(tensor: Any, param: Tensor) -> bool:
    """Whether a tensor is sharded like the parameter, so that their local shards have the same elements."""
    if not is_dtensor(tensor) or not is_dtensor(param):
        return is_dtensor(tensor) == is_dtensor(param)
    if tensor._spec is param._spec:  # type: ignore[attr-defined]
        return True
    return bool(tensor.device_mesh == param.device_mesh and tensor.placements == param.placements)  # type: ignore[attr-defined]


def distributed_like(tensor: Tensor, param: Tensor, placements: Sequence[Any] | None = None) -> Tensor:
    """Shards or redistributes a whole tensor, (1000, 64), over the parameter's mesh, like the parameter or by
    ``placements``."""
    if placements is None and is_sharded_like(tensor, param):
        return tensor
    if not is_dtensor(param):
        return tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]
    mesh = param.device_mesh  # type: ignore[attr-defined]
    placements = param.placements if placements is None else placements  # type: ignore[attr-defined]
    if is_dtensor(tensor) and tensor.device_mesh == mesh:  # type: ignore[attr-defined]
        return tensor.redistribute(placements=placements)  # type: ignore[attr-defined, no-any-return]
    whole = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return compat.distribute(whole.to(param.device), mesh, placements)


def with_local(tensor: Tensor, shard: Tensor) -> Tensor:
    """A tensor, (1000, 64), that is sharded like ``tensor`` and has this local shard, (250, 64)."""
    if not is_dtensor(tensor):
        return shard
    # DTensor.from_local would move the shard to the mesh's device: with CPU offload it belongs on the host
    made: Any = torch.empty_like(tensor, dtype=shard.dtype, requires_grad=False)
    made._local_tensor = shard
    return made  # type: ignore[no-any-return]


def with_shard(tensor: Tensor, shard: Tensor) -> Tensor:
    """The same tensor with its local shard elsewhere, as on the host. Nothing is allocated for it on the device."""
    if not is_dtensor(tensor):
        return shard
    made: Any = type(tensor)
    return made(shard, tensor._spec, requires_grad=False)  # type: ignore[attr-defined, no-any-return]


def sharded_blocks(param: Tensor, blocks: Tensor) -> Tensor:
    """``blocks``, (250, 2), with one value for 32 neighbors, as a tensor, (1000, 2), that is sharded like the
    parameter."""
    return with_shape(param, blocks, block_shape(param.shape))


def local_block_shape(param: Tensor) -> torch.Size:
    """The local shape of an array by block: (250, 2). Shards are counted row by row, however they are stored."""
    here = local(param)
    return block_shape(here.shape, not is_dtensor(param) and is_channels_last(here))


def with_shape(tensor: Tensor, shard: Tensor, shape: Sequence[int], placements: Sequence[Any] | None = None) -> Tensor:
    """A tensor of another shape that has this local shard, and is sharded along the same dimensions as ``tensor``, or
    by ``placements``."""
    if not is_dtensor(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements if placements is None else placements  # type: ignore[attr-defined]
    made: Any = DTensor.from_local(
        shard.new_empty(shard.shape, device=mesh.device_type), mesh, placements, run_check=False,
        shape=torch.Size(shape), stride=stride,
    )  # fmt: skip
    made._local_tensor = shard  # with CPU offload it stays on the host
    return made  # type: ignore[no-any-return]


def cuts_blocks(param: Tensor) -> bool:
    """Whether some process has a part of a block: 32 neighbors of the last dimension, or of all but the first."""
    if not is_dtensor(param) or not param.dim():
        return False
    if param.shape[-1] % PER_BLOCK:
        return any(count > 1 for dim in range(1, param.dim()) for count, _, _ in _shards_along(param, dim))
    sizes = {int(param.shape[-1])}
    for count, _, placement in _shards_along(param, param.dim() - 1):
        chunks = {-(-size // count) for size in sizes}
        rests = {size % chunk for size in sizes for chunk in chunks if chunk}  # of the last process that has any
        sizes = chunks | rests
        if type(placement).__name__ != "Shard" or any(size % PER_BLOCK for size in sizes):
            return True
    return False


INDEX_FIELDS = ("_index", "_extent1", "_extent2", "_jump1", "_jump2", "_jump3")  # an IndexMap, in a launch table


class IndexMap(NamedTuple):
    """Where the i-th element of a shard is in the whole parameter, both counted row by row.

    A shard along dimension 0 is one run: for (250, 64) of (1000, 64), only ``first`` is set, 48,000. Other shards are
    runs of runs: ``extent1`` elements of the shard lie within one item of the outermost dimension, and ``extent2`` of
    those within one of the next. For (1000, 16) of (1000, 64): ``first`` is 48, the first column; ``extent2`` is 16,
    the length of a run; ``jump2`` is 64, from one run to the next; and ``extent1`` is all 16,000 elements.
    """

    first: int = 0
    extent1: int = 1
    extent2: int = 1
    jump1: int = 1
    jump2: int = 1
    jump3: int = 1

    @property
    def is_one_run(self) -> bool:
        return (self.extent1, self.extent2, self.jump1, self.jump2, self.jump3) == (1, 1, 1, 1, 1)

    def index_of(self, i: Any) -> Any:
        if self.is_one_run:
            return self.first + i
        rest = i % self.extent1
        inner = rest // self.extent2 * self.jump2 + rest % self.extent2 * self.jump3
        return self.first + i // self.extent1 * self.jump1 + inner


def index_map(param: Tensor) -> IndexMap:
    """Of the local shard of a parameter."""
    if not is_dtensor(param) or param.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return IndexMap()
    first, runs = 0, []
    stride = math.prod(param.shape)
    for dim, size in enumerate(param.shape):
        stride //= max(1, size)
        begin, inside = _runs(held(param, dim))
        first += begin * stride
        runs += [(count, jump * stride) for count, jump in inside if count != 1]
    if any(count == 0 for count, _ in runs):
        return IndexMap()
    merged: list[tuple[int, int]] = []
    for count, jump in reversed(runs):  # from the innermost; neighbors without a gap are one run
        if merged and jump == merged[0][0] * merged[0][1]:
            merged[0] = (count * merged[0][0], merged[0][1])
        else:
            merged.insert(0, (count, jump))
    if not merged or (len(merged) == 1 and merged[0][1] == 1):
        return IndexMap(first)
    if len(merged) > 3:
        raise RuntimeError(
            f"a DTensor of shape {tuple(param.shape)} is sharded along too many dimensions for stochastic rounding, "
            "which counts its elements; shard it along two of them at most, or use storage='exact'"
        )
    (_, jump1), (count2, jump2), (count3, jump3) = [(1, 1)] * (3 - len(merged)) + merged
    return IndexMap(first, count2 * count3, count3, jump1, jump2, jump3)


def local_shape(param: Tensor) -> tuple[int, ...]:
    """The shape of the local shard. If it has no elements, torch may give it any shape that has none; here each
    dimension is as long as the part that this process has of it."""
    here = local(param)
    if here.numel() or not is_dtensor(param) or param.device_mesh.get_coordinate() is None:  # type: ignore[attr-defined]
        return tuple(here.shape)
    indices = (held(param, k) for k in range(param.dim()))
    return tuple(len(those) if those is not None else 0 for those in indices)


def held(param: Any, dim: int, coordinates: Sequence[int] | None = None) -> Tensor | None:
    """Which indices of a dimension a process has: this one, or the one at these coordinates of the mesh. None if torch
    itself does not know."""
    shape = [1] * param.dim()
    shape[dim] = -1
    indices = torch.arange(param.shape[dim]).view(shape)
    for size, coordinate, placement in _shards_along(param, dim, coordinates):
        try:
            pieces, _ = placement._split_tensor(indices, size, with_padding=False, contiguous=False)
        except AssertionError:  # torch 2.6 has no uneven strides
            return None
        indices = pieces[coordinate]
    return indices.flatten()


def _shards_along(param: Any, dim: int, coordinates: Sequence[int] | None = None) -> list[tuple[int, int, Any]]:
    """The placements that shard a dimension, with their number of processes and the coordinate of this one, or of the
    one at ``coordinates``, in the order in which they cut it.

    The strided ones of FSDP2 cut what the ones to their right have left, and come after them as plain ones. torch reads
    all of them from left to right, which is the same where sizes are even.
    """
    from torch.distributed.tensor import Shard

    mesh = param.device_mesh
    given = [
        (size, coordinate, placement)
        for size, coordinate, placement in zip(
            mesh.shape, coordinates or mesh.get_coordinate(), param.placements, strict=True
        )
        if getattr(placement, "dim", None) == dim
    ]
    plain: list[tuple[int, int, Any]] = []
    strided: list[tuple[int, int, Any]] = []
    to_the_right = 1
    for size, coordinate, placement in reversed(given):
        factor = getattr(placement, "split_factor", 1)
        if factor not in (1, to_the_right):
            return given
        if factor == 1:
            plain.insert(0, (size, coordinate, Shard(dim)))
        else:
            strided.append((size, coordinate, Shard(dim)))
        to_the_right *= size
    return [*plain, *strided]


def _runs(indices: Tensor | None) -> tuple[int, list[tuple[int, int]]]:
    """Indices as (count, distance) of runs and of the items in a run, and the first of them."""
    if indices is not None:
        if not len(indices):
            return 0, [(0, 1)]
        first, count = int(indices[0]), len(indices)
        breaks = (indices.diff() != 1).nonzero().flatten()
        if not len(breaks):
            return first, [(count, 1)]
        length = int(breaks[0]) + 1
        jump = int(indices[length]) - first
        i = torch.arange(count)
        if torch.equal(indices, first + i // length * jump + i % length):
            return first, [(-(-count // length), jump), (length, 1)]
    raise RuntimeError(
        "a DTensor's rows are dealt out to the processes in strides of different lengths, and stochastic rounding has "
        "to know where each is; choose sizes that the mesh divides evenly, or use storage='exact'"
    )


class Sharding(NamedTuple):
    """How a parameter is sharded over the processes of a mesh."""

    mesh: DeviceMesh
    contributes: bool  # this process contributes to sums: of several replicas of a shard, only the first does
    splits_rows: bool  # rows (indices of dimension 0) are themselves sharded; else each is whole on its process
    strided: bool  # rows are distributed in strides (as FSDP2 does after tensor parallelism)
    rows: int  # of the whole parameter: 1000
    first_row: int  # of the local shard, unless strided: 750 with Shard(0)
    along: tuple[tuple[int, ...], ...]  # for each dimension of the parameter, the dimensions of the mesh that shard it:
    # ((0,), ()) with Shard(0), ((), (0,)) with Shard(1)

    @property
    def by_row_and_column(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions of the mesh that share out each row, and each column, of the last two dimensions: ((0,), ())
        with Shard(1)."""
        return self.along[-1], self.along[-2]

    @property
    def contributes_rows(self) -> bool:
        """The same as ``contributes``, for what is summed up over whole rows: these are replicas, once each process has
        added what the others have of its rows."""
        coordinates: Any = self.mesh.get_coordinate()
        return self.contributes and all(coordinates[k] == 0 for k in self.along[-1])


def sharding_of(param: Tensor) -> Sharding | None:
    """How a parameter is sharded; None if this process needs nothing from the others."""
    if not is_dtensor(param):
        return None
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    placements: Any = param.placements  # type: ignore[attr-defined]
    coordinates = mesh.get_coordinate()
    if coordinates is None or all(placement.is_replicate() for placement in placements):
        return None
    if is_partial(param):
        raise RuntimeError(
            "a parameter is a DTensor with a Partial placement, which has no value yet; .redistribute() it to Shard or "
            "Replicate"
        )
    contributes, splits_rows, strided = True, False, False
    first_row, rows = 0, int(param.shape[0])
    for size, coordinate, placement in zip(mesh.shape, coordinates, placements, strict=True):
        if placement.is_replicate():
            contributes = contributes and coordinate == 0
        elif placement.dim == 0:
            strided = strided or type(placement).__name__ != "Shard"
            chunk = -(-rows // size)
            begin = min(coordinate * chunk, rows)
            first_row, rows = first_row + begin, min(chunk, rows - begin)
        else:
            splits_rows = True
    along = tuple(
        tuple(k for k, placement in enumerate(placements) if getattr(placement, "dim", None) == dim)
        for dim in range(param.dim())
    )
    return Sharding(mesh, contributes, splits_rows, strided, int(param.shape[0]), first_row, along)
