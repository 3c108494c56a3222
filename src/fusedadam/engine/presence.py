"""Gradients that only some processes have, of sharded parameters whose states the processes share.

A state that is computed from sums over the whole parameter, such as Adafactor's average by column, is the same on all
processes that have a shard along the dimension it leaves out. It stays so only if all of them take the step, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from fusedadam.engine.participant import Participant
from fusedadam.engine.reduction import group_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Presence:
    """``gradients``: of each parameter of a mesh whose states are shared, whether it has a gradient here. Every process
    has the same parameters, in the same order."""

    def __init__(self, mesh: DeviceMesh, gradients: Mapping[int, bool]) -> None:
        self._gradients, self._group = gradients, group_of(mesh)
        self._here = torch.tensor([*gradients.values()], dtype=torch.float32, device=mesh.device_type)

    def only_elsewhere(self) -> list[int]:
        """The parameters that have a gradient on another process, and none here. All processes of the mesh have to ask;
        only one that has no gradient of some waits for its device."""
        import torch.distributed as dist

        counts = self._here.clone()
        dist.all_reduce(counts, group=self._group)
        if all(self._gradients.values()):
            return []
        found = zip(self._gradients.items(), counts.tolist(), strict=True)
        return [k for (k, is_here), count in found if count and not is_here]


def presences(participants: Sequence[Participant]) -> list[Presence]:
    """One for each mesh, in an order that is the same on every process."""
    by_mesh: dict[DeviceMesh, dict[int, bool]] = {}
    for p in participants:
        if p.shares_states:
            mesh: DeviceMesh = p.param.device_mesh  # type: ignore[attr-defined]
            by_mesh.setdefault(mesh, {})[p.index] = not p.is_absent
    return [Presence(mesh, gradients) for mesh, gradients in by_mesh.items()]
