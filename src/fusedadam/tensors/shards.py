"""Tensors that are divided among processes, torch's DTensor: which part of them is here, and how the rest is divided.

Kernels only ever see the part that this process holds. For rules that sum, reduction.py adds up what the processes have
found.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: Any) -> bool:
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # takes long to import, and without it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def is_partial(tensor: Any) -> bool:
    """Whether each process has a summand, so that the tensor has no value yet."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def local(tensor: Any) -> Any:
    """The part that this process holds; of anything but a DTensor that is all of it."""
    if not is_dtensor(tensor):
        return tensor
    here = tensor._local_tensor
    return here if type(here) is Tensor or not hasattr(here, "trigger_wait") else here.trigger_wait()


def memory_of(tensor: Any) -> tuple[Any, ...]:
    """What tells apart the memory of tensors here, and how it is seen."""
    here = local(tensor)
    if here.layout != torch.strided or here.is_nested or is_lazy(here):
        return (id(here),)
    return here.device, here.data_ptr(), here.dtype, here.shape, here.stride()


def lies_like(tensor: Any, param: Tensor) -> bool:
    """Whether a tensor is divided as the parameter is, so that the parts belong together."""
    if not is_dtensor(tensor) or not is_dtensor(param):
        return is_dtensor(tensor) == is_dtensor(param)
    if tensor._spec is param._spec:  # type: ignore[attr-defined]
        return True
    return bool(tensor.device_mesh == param.device_mesh and tensor.placements == param.placements)  # type: ignore[attr-defined]


def distributed_like(tensor: Tensor, param: Tensor) -> Tensor:
    """A tensor of the whole parameter's shape, divided as the parameter is."""
    if lies_like(tensor, param):
        return tensor
    if not is_dtensor(param):
        return tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]
    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    if is_dtensor(tensor) and tensor.device_mesh == mesh:  # type: ignore[attr-defined]
        return tensor.redistribute(placements=placements)  # type: ignore[attr-defined, no-any-return]
    from torch.distributed.tensor import distribute_tensor

    whole = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    # every process has it whole: each takes its own part, and nothing is sent
    return distribute_tensor(whole.to(param.device), mesh, placements, src_data_rank=None)


def with_local(tensor: Tensor, here: Tensor) -> Tensor:
    """A tensor divided as ``tensor`` is, of which ``here`` is the part of this process."""
    if not is_dtensor(tensor):
        return here
    # not DTensor.from_local, which would move it to the mesh's device: with CPU offload it belongs on the host
    made: Any = torch.empty_like(tensor, dtype=here.dtype, requires_grad=False)
    made._local_tensor = here
    return made  # type: ignore[no-any-return]


class Sharding(NamedTuple):
    """How a parameter is divided among the processes of a mesh."""

    mesh: DeviceMesh
    counts: bool  # of several processes that hold the same part, one counts
    split: bool  # rows (indices of dimension 0) are divided themselves; else each is whole, wherever it is
    strided: bool  # rows are dealt out in strides (as FSDP2 after tensor parallel does)
    rows: int  # of the whole parameter
    first: int  # which of them is the first here, unless strided


def sharding_of(param: Tensor) -> Sharding | None:
    """None: this process has all that it needs to know."""
    if not is_dtensor(param):
        return None
    mesh: Any = param.device_mesh  # type: ignore[attr-defined]
    placements: Any = param.placements  # type: ignore[attr-defined]
    at = mesh.get_coordinate()
    if at is None or all(placement.is_replicate() for placement in placements):
        return None
    if is_partial(param):
        raise RuntimeError(
            "a DTensor has a Partial placement, and so no value yet; .redistribute() it to Shard or Replicate"
        )
    counts, split, strided = True, False, False
    first, rows = 0, int(param.shape[0])
    for size, coordinate, placement in zip(mesh.shape, at, placements, strict=True):
        if placement.is_replicate():
            counts = counts and coordinate == 0
        elif placement.dim == 0:
            strided = strided or type(placement).__name__ != "Shard"
            chunk = -(-rows // size)
            begin = min(coordinate * chunk, rows)
            first, rows = first + begin, min(chunk, rows - begin)
        else:
            split = True
    return Sharding(mesh, counts, split, strided, int(param.shape[0]), first)
