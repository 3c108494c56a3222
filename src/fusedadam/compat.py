"""What differs between the versions of torch that are supported, in one place.

Each entry asks for the feature, never for the version number, and says which version makes it obsolete: once that is
the oldest one supported, the entry goes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Makes a DTensor of a tensor that every process has whole: each takes its shard, and nothing is sent.

    Obsolete with torch 2.7, whose ``distribute_tensor`` has ``src_data_rank``.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    whole = DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements)
