"""States that leave out dimensions of their parameter: by row, by column, by tensor. Their shapes and their shards.

Where a parameter is sharded along a dimension that its state leaves out, every process has the whole of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedadam.tensors.shards import distributed_like, is_dtensor, is_sharded_like, with_local, with_shape

LEFT_OUT = {"row": 1, "column": 2}  # the dimension, counted from the last


def shape_in(space: str, shape: Sequence[int]) -> torch.Size:
    """The shape of a state of a parameter with this shape."""
    if space == "element":
        return torch.Size(shape)
    if space == "tensor":
        return torch.Size(())
    kept = list(shape)
    kept[-LEFT_OUT[space]] = 1
    return torch.Size(kept)


def is_sharded_in(space: str, value: Any, param: Tensor) -> bool:
    """Whether a state's local shard belongs to the parameter's."""
    if space == "element" or not is_dtensor(param) or not is_dtensor(value):
        return is_sharded_like(value, param)
    return bool(value.device_mesh == param.device_mesh and list(value.placements) == placements_in(space, param))  # type: ignore[attr-defined]


def placements_in(space: str, param: Tensor) -> list[Any]:
    """How a state is sharded: as its parameter, but replicated along what it leaves out."""
    from torch.distributed.tensor import Replicate

    given = list(param.placements)  # type: ignore[attr-defined]
    if space == "element":
        return given
    left_out = None if space == "tensor" else param.dim() - LEFT_OUT[space]
    replicated = [left_out is None or getattr(placement, "dim", None) == left_out for placement in given]
    return [Replicate() if alike else placement for alike, placement in zip(replicated, given, strict=True)]


def with_local_in(space: str, param: Tensor, shard: Tensor) -> Tensor:
    """A state that is sharded as its parameter is and has this local shard."""
    if space == "element" or not is_dtensor(param):
        return with_local(param, shard)
    return with_shape(param, shard, shape_in(space, param.shape), placements_in(space, param))


def distributed_in(space: str, value: Tensor, param: Tensor) -> Tensor:
    """Shards or redistributes a whole state as its parameter asks."""
    if is_sharded_in(space, value, param):
        return value
    return distributed_like(value, param, placements_in(space, param) if is_dtensor(param) else None)
