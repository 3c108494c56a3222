"""A parameter that takes part in a launch, with everything that a launch has to know about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from fusedadam.rules.rule import SpecializedRule
from fusedadam.tensors.formats import FORMAT_OF_DTYPE
from fusedadam.tensors.shards import Sharding, sharding_of

if TYPE_CHECKING:
    from fusedadam.engine.backend import Backend

Roles: TypeAlias = Mapping[str, Tensor]


@dataclass
class Member:
    """``roles`` are the tensors on this process: for a DTensor, its local shard."""

    specialized: SpecializedRule
    backend: Backend
    roles: Roles
    group: int = 0
    whole: Tensor | None = None  # the parameter itself, if it may be a DTensor; None: as roles["param"]
    is_absent: bool = False  # no gradient on this process, but others wait for its part of a sum
    redistributes_grad: bool = False  # its gradient is sharded differently, and redistributed on every run

    @cached_property
    def sharding(self) -> Sharding | None:
        """None: this process can sum over the parameter alone, or the rule does not sum."""
        return sharding_of(self.whole) if self.specialized.has_sums and self.whole is not None else None

    @cached_property
    def formats(self) -> dict[str, str]:
        """The storage format of each role."""
        return {role: FORMAT_OF_DTYPE[self.roles[role].dtype] for role in self.specialized.roles}

    @property
    def launch_key(self) -> Any:
        """Members with the same key share a launch: the same device, rule, flags, formats, backend and mesh."""
        formats = tuple(self.formats.values())
        mesh = self.sharding and (self.sharding.mesh, self.sharding.splits_rows, self.is_absent)
        return self.roles["param"].device, self.specialized, formats, self.backend, mesh
