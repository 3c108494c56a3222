"""The local shard of a tensor, computed by hand, and parameters that are sharded accordingly.

Runs inside the processes of a world.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def fully_shard(module: torch.nn.Module, **options: Any) -> None:
    """As torch's, but torch divides by the number of processes: asked for a mean, gloo of torch 2.8 returns a sum."""
    torch.distributed.fsdp.fully_shard(module, **options)
    if hasattr(module, "set_force_sum_reduction_for_comms"):
        module.set_force_sum_reduction_for_comms(True)


@functools.cache
def mesh_of(*shape: int, names: tuple[str, ...] = ("a", "b", "c")) -> DeviceMesh:
    """Made once: each new one opens connections of its own."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])


def part_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """A copy of this process's part. A strided shard divides what the plain ones have left, whatever their order."""
    at = mesh.get_coordinate()
    assert at is not None
    each = sorted(zip(placements, mesh.shape, at, strict=True), key=lambda one: type(one[0]) not in (Shard, Replicate))
    for placement, size, coordinate in each:
        if not placement.is_replicate():
            chunks = whole.chunk(size, placement.dim)  # type: ignore[attr-defined]
            rest = whole.narrow(placement.dim, 0, 0)  # type: ignore[attr-defined]
            whole = chunks[coordinate] if coordinate < len(chunks) else rest
    return whole.clone(memory_format=torch.contiguous_format)


def divided(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return from_part(part_of(whole, mesh, placements), whole.shape, mesh, placements)


def from_part(part: Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def divided_like(whole: Tensor, param: Any, lay: Callable[[Tensor], Tensor] = lambda part: part) -> Tensor:
    """A gradient for ``param``, of which every process knows the whole; ``lay`` puts its part in memory."""
    if not isinstance(param, DTensor):
        return lay(whole.clone())
    part = lay(expected_here(whole, param).to(param.dtype))
    return from_part(part, param.shape, param.device_mesh, param.placements)


def expected_here(whole: Tensor, param: Any) -> Tensor:
    if not isinstance(param, DTensor):
        return whole
    part = part_of(whole, param.device_mesh, param.placements)
    # what has no elements may have any shape that has none: FSDP2 gives it another than tensor parallel
    return part if part.numel() else part.reshape(param._local_tensor.shape)


def fitting(placement: Placement, dimensions: int) -> Placement:
    """Vectors have no second dimension to be divided along, and scalars no first."""
    if placement.is_replicate() or dimensions == 0:
        return R
    return placement if placement.dim < dimensions else S0  # type: ignore[attr-defined]


def parameter(whole: Tensor, mesh: DeviceMesh, *placements: Placement) -> torch.nn.Parameter:
    own = [fitting(placement, whole.dim()) for placement in placements]
    return torch.nn.Parameter(divided(whole, mesh, own))


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def here(tensor: Any) -> Tensor:
    """What this process has of it, as it is."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def which_part(param: Any) -> tuple[Any, ...]:
    """The same on processes that hold the same part of it."""
    if not isinstance(param, DTensor):
        return ()
    mesh, at = param.device_mesh, param.device_mesh.get_coordinate()
    assert at is not None
    return tuple(
        None if p.is_replicate() else c for p, c in zip(param.placements, at, strict=True)
    ), mesh.mesh_dim_names


def digest(tensors: Iterable[Any]) -> str:
    """Of the bits that this process holds."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(here(tensor).reshape(-1).clone().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
