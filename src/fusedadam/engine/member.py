"""A parameter that takes part in a launch, with everything that a launch has to know about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS
from fusedadam.rules.newton_schulz import DEFAULT, NewtonSchulz
from fusedadam.rules.rule import SpecializedRule
from fusedadam.tensors.layout import dense_strides, ordered_strides, row_major_strides
from fusedadam.tensors.matrices import Matrices, matrices_of
from fusedadam.tensors.shards import IndexMap, Sharding, index_map, is_dtensor, sharding_of

if TYPE_CHECKING:
    from fusedadam.engine.backend import Backend

Roles: TypeAlias = Mapping[str, Tensor]


def strides_for(here: Tensor, formats: Iterable[str], specialized: SpecializedRule, is_shard: bool) -> tuple[int, ...]:
    """The strides of a parameter's arrays by element on this process. Shards, factored states and products of matrices
    count elements row by row; noise and blocks of a whole parameter also in the order of channels_last."""
    is_counted = any(FORMATS[fmt].is_deferred for fmt in formats)
    if specialized.is_factored or specialized.product is not None or (is_counted and is_shard):
        return row_major_strides(here)
    return ordered_strides(here) if is_counted else dense_strides(here, specialized.by_rows)


@dataclass
class Member:
    """``roles`` are the tensors on this process, by the names of the arrays: for a DTensor, its local shard."""

    specialized: SpecializedRule
    backend: Backend
    roles: Roles
    group: int = 0
    whole: Tensor | None = None  # the parameter itself, if it may be a DTensor; None: as roles["param"]
    is_absent: bool = False  # no gradient on this process, but others wait for its part of a sum
    resolves_grad: bool = False  # its gradient is redistributed, or its conjugation resolved, on every run
    chosen: Mapping[str, str] = field(default_factory=dict)  # formats of roles that their dtypes do not tell
    seed: int = 0  # of the noise of stochastic rounding
    newton_schulz: NewtonSchulz = DEFAULT  # of a rule that orthogonalizes
    over_the_bus: bool = False  # its states are in host memory
    beside_model: bool = False  # kernels must leave most of the device to the model

    @cached_property
    def sharding(self) -> Sharding | None:
        """None: this process can sum over the parameter alone, or the rule does not sum."""
        return sharding_of(self.whole) if self.specialized.has_sums and self.whole is not None else None

    @cached_property
    def formats(self) -> dict[str, str]:
        """The storage format of each role."""
        return {
            role: self.chosen[role] if role in self.chosen else FORMAT_OF_DTYPE[self.roles[role].dtype]
            for role in self.specialized.roles
        }

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is kept in its own dtype alone, without low-order bits or noise."""
        own = FORMAT_OF_DTYPE[self.roles["param"].dtype]
        return self.chosen.get("param", own) == own

    @cached_property
    def index_map(self) -> IndexMap | None:
        """Where its elements are in the whole parameter; None if nothing is rounded stochastically."""
        if not any(FORMATS[self.formats[role]].is_stochastic for role in self.specialized.outputs):
            return None
        return IndexMap() if self.whole is None or self.is_absent else index_map(self.whole)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides that all arrays by element have, or are copied to."""
        is_shard = self.whole is not None and is_dtensor(self.whole)
        return strides_for(self.roles["param"], self.formats.values(), self.specialized, is_shard)

    @property
    def matrices(self) -> Matrices:
        """What a rule that orthogonalizes sees in the whole parameter."""
        return matrices_of((self.roles["param"] if self.whole is None else self.whole).shape)

    @property
    def launch_key(self) -> Any:
        """Members with the same key share a launch: the same device, rule, flags, formats, backend and mesh, alike
        shards, and matrices of one shape where they are multiplied."""
        formats = tuple(self.formats.values())
        cut = self.sharding and (self.sharding.by_row_and_column if self.specialized.is_factored else None)
        mesh = self.sharding and (self.sharding.mesh, self.sharding.splits_rows, cut)
        runs = self.index_map and self.index_map.is_one_run
        product = None if self.specialized.product is None else (self.newton_schulz, self.matrices[1:])
        kernels = self.roles["param"].device, self.specialized, formats, self.backend
        return *kernels, mesh, self.is_absent, runs, product
