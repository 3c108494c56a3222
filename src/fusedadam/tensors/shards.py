"""Sharded tensors (torch's DTensor): the local shard, and how a parameter is sharded.

Kernels only see the local shard. For rules that sum, reduction.py reduces the sums over the processes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusedadam import compat

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
    """The local shard of a DTensor; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    shard = tensor._local_tensor
    return shard if type(shard) is Tensor or not hasattr(shard, "trigger_wait") else shard.trigger_wait()


def memory_of(tensor: Any) -> tuple[Any, ...]:
    """A key that is equal for tensors which are the same view of the same local memory."""
    shard = local(tensor)
    if shard.layout != torch.strided or shard.is_nested or is_lazy(shard):
        return (id(shard),)
    return shard.device, shard.data_ptr(), shard.dtype, shard.shape, shard.stride()


def is_sharded_like(tensor: Any, param: Tensor) -> bool:
    """Whether a tensor is sharded like the parameter, so that their local shards have the same elements."""
    if not is_dtensor(tensor) or not is_dtensor(param):
        return is_dtensor(tensor) == is_dtensor(param)
    if tensor._spec is param._spec:  # type: ignore[attr-defined]
        return True
    return bool(tensor.device_mesh == param.device_mesh and tensor.placements == param.placements)  # type: ignore[attr-defined]


def distributed_like(tensor: Tensor, param: Tensor) -> Tensor:
    """Shards or redistributes a tensor of the whole parameter's shape like the parameter."""
    if is_sharded_like(tensor, param):
        return tensor
    if not is_dtensor(param):
        return tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    if is_dtensor(tensor) and tensor.device_mesh == mesh:  # type: ignore[attr-defined]
        return tensor.redistribute(placements=placements)  # type: ignore[attr-defined, no-any-return]
    whole = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return compat.distribute(whole.to(param.device), mesh, placements)


def with_local(tensor: Tensor, shard: Tensor) -> Tensor:
    """A tensor that is sharded like ``tensor`` and has this local shard."""
    if not is_dtensor(tensor):
        return shard
    # DTensor.from_local would move the shard to the mesh's device: with CPU offload it belongs on the host
    made: Any = torch.empty_like(tensor, dtype=shard.dtype, requires_grad=False)
    made._local_tensor = shard
    return made  # type: ignore[no-any-return]


class Sharding(NamedTuple):
    """How a parameter is sharded over the processes of a mesh."""

    mesh: DeviceMesh
    contributes: bool  # this process contributes to sums: of several replicas of a shard, only the first does
    splits_rows: bool  # rows (indices of dimension 0) are themselves sharded; else each is whole on its process
    strided: bool  # rows are distributed in strides (as FSDP2 does after tensor parallelism)
    rows: int  # of the whole parameter
    first_row: int  # of the local shard, unless strided


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
    return Sharding(mesh, contributes, splits_rows, strided, int(param.shape[0]), first_row)
