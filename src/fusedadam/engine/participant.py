"""A parameter that takes part in a step, as the optimizer has it, and the states that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.backend import Backend
from fusedadam.engine.member import Member, Roles, strides_for
from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS, Array, compute_dtype, loses_bits, names_in
from fusedadam.rules.newton_schulz import DEFAULT, NewtonSchulz
from fusedadam.rules.rule import SpecializedRule
from fusedadam.tensors import host_memory
from fusedadam.tensors.complex_numbers import part_dtype, parts
from fusedadam.tensors.factored import is_sharded_in, shape_in, with_local_in
from fusedadam.tensors.host_memory import HostMemory, slab_of, slabs_of
from fusedadam.tensors.layout import (
    block_shape,
    copy_with,
    has_strides,
    is_channels_last,
    is_plain,
    row_major_strides,
)
from fusedadam.tensors.shards import (
    is_dtensor,
    is_sharded_like,
    local,
    local_block_shape,
    local_shape,
    sharded_blocks,
    sharding_of,
    with_shard,
)
from fusedadam.tensors.transfer import capturing

StateDict: TypeAlias = dict[str, Any]  # of one parameter, by name


@dataclass
class Participant:
    """A parameter that takes part in the step, as the optimizer has it.

    A sharded parameter whose sums other processes wait for takes part even if it has no gradient here.
    """

    param: Tensor
    grad: Tensor | None  # as it was when the plan was begun; another thread may replace it at any time
    index: int  # among all parameters of the optimizer
    group: int
    specialized: SpecializedRule
    backend: Backend
    new_state: Callable[[str, StateDict], StateDict]  # a role's arrays: as kept before, or with the initial value
    chosen: Mapping[str, str] = field(default_factory=dict)  # formats of roles; of the others, the dtype tells
    seed: int = 0
    newton_schulz: NewtonSchulz = DEFAULT
    host: HostMemory | None = None  # where its states are kept, unless on the parameter's device
    in_backward: bool = False  # while the model computes other gradients
    state: StateDict = field(default_factory=dict)  # as it will be: what was there, and ``fresh``
    fresh: StateDict = field(default_factory=dict)  # states that are made with the plan
    stale: list[str] = field(default_factory=list)  # arrays that a role was kept in before
    joined: Tensor | None = None  # the low bits of a weight that has become float32

    @property
    def is_absent(self) -> bool:
        return self.grad is None

    @cached_property
    def arrays(self) -> dict[str, Array | None]:
        """The arrays of all roles by name; None for those of any dtype."""
        found: dict[str, Array | None] = {}
        for role in self.specialized.roles:
            found |= arrays_of(role, self.chosen.get(role))
        return found

    @property
    def state_arrays(self) -> list[str]:
        return [name for name in self.arrays if name not in ("param", "grad")]

    @cached_property
    def smaller_shapes(self) -> dict[str, torch.Size]:
        """The local shapes of arrays by block, and of states that leave out dimensions."""
        spaces = self.specialized.rule.spaces
        smaller = [role for role in self.specialized.roles if spaces[role] != "element"]
        by_block = [name for name, array in self.arrays.items() if array is not None and array.by == "block"]
        return {
            **{role: shape_in(spaces[role], local_shape(self.param)) for role in smaller},
            **{name: local_block_shape(self.param) for name in by_block},
        }

    @property
    def hosted(self) -> list[str]:
        """The state arrays that are in host memory."""
        return [name for name in self.state_arrays if slab_of(self.state[name]) is not None]

    def is_at_home(self, here: Tensor) -> bool:
        """Whether a state is where it is kept: on the device, or in host memory that is page-locked for it."""
        slab, device = slab_of(here), local(self.param).device
        if self.host is not None and here.nbytes >= host_memory.SMALLEST:
            return slab is not None and slab.device == device
        return slab is None and here.device == device

    def brought_home(self, here: Tensor, strides: tuple[int, ...], is_new: bool) -> Tensor:
        """A copy of a state, where it is kept."""
        device = local(self.param).device
        if self.host is None or here.nbytes < host_memory.SMALLEST or capturing():
            return copy_with(here.to(device), strides)
        self.host.moved += slab_of(here) is None and not is_new
        return self.host.copy(here, strides, device)

    @property
    def shares_states(self) -> bool:
        """Whether other processes have the same values of a state, computed from sums over all of their shards."""
        spaces = [self.specialized.rule.spaces[role] for role in self.specialized.summed_states]
        return sharding_of(self.param) is not None and not all(
            is_sharded_in(by, self.param, self.param) for by in spaces
        )

    @property
    def resolves_grad(self) -> bool:
        """Whether kernels see a copy of its gradient that is made on every run: it is sharded differently from its
        parameter, or it is lazily conjugated."""
        if self.grad is None:
            return False
        return not is_sharded_like(self.grad, self.param) or local(self.grad).is_conj()

    @property
    def has_wider_grad(self) -> bool:
        """Whether a step computes with fewer bits than its gradient has."""
        return self.grad is not None and loses_bits(
            FORMAT_OF_DTYPE[part_dtype(self.grad.dtype)], FORMAT_OF_DTYPE[compute_dtype(part_dtype(self.param.dtype))]
        )

    def as_member(self) -> Member:
        return Member(
            self.specialized,
            self.backend,
            self._roles(),
            self.group,
            self.param,
            self.is_absent,
            self.resolves_grad,
            self.chosen,
            self.seed,
            self.newton_schulz,
            self.host is not None,
            self.host is not None and self.in_backward,
        )

    def _roles(self) -> Roles:
        here = local(self.param)
        if self.is_absent:
            return dict.fromkeys(self.arrays, parts(here.new_empty(0)))
        grad: Any = self.grad
        if self.resolves_grad:  # on every run, perhaps with the other processes; here only its form counts
            grad = torch.empty_like(here, dtype=grad.dtype, device=grad.device)
        return {
            "param": parts(here),
            "grad": parts(local(grad)),
            **{name: parts(local(self.state[name])) for name in self.state_arrays},
        }


def prepare_states(participants: Sequence[Participant], known: Mapping[Tensor, StateDict]) -> None:
    """Checks parameters and gradients, and makes the states that are missing. ``known``: the states of all parameters,
    which this does not change."""
    _check(participants)
    for p in participants:
        before = known.get(p.param, {})
        p.fresh = {} if p.is_absent else _fresh_states(p, before)
        found = [name for role in p.specialized.roles if role != "grad" for name in names_in(role, before)]
        p.stale = [] if p.is_absent else [name for name in found if name not in p.arrays]
        if "param_low" in p.stale and p.param.dtype in (torch.float32, torch.float64):
            p.joined = before["param_low"]
        p.state = {name: value for name, value in {**before, **p.fresh}.items() if name not in p.stale}
    if capturing() and any(p.fresh for p in participants):
        raise RuntimeError(
            "step() is being captured in a CUDA graph, and would make new states, which every replay would reset; "
            "take a step, with the same parameters and options, before the capture"
        )


def _check(participants: Sequence[Participant]) -> None:
    for p in participants:
        check_shape(p.specialized, p.param.shape)
        dtypes = checks.dtypes_like(p.param)
        checks.written("param", p.param, dtypes)
        if not p.is_absent:
            checks.tensor("grad", p.grad, dtypes)
            checks.both_sharded("grad", p.grad, p.param)
    checks.new_tensors("param")


def check_shape(specialized: SpecializedRule, shape: Sequence[int]) -> None:
    """Refuses a parameter of a shape that a rule cannot take."""
    name = specialized.rule.name
    if specialized.is_factored and len(shape) < 2:
        raise ValueError(
            f"a parameter has shape {tuple(shape)}, without rows and columns, for which the rule {name} has values; "
            "compute them under `if matrix:`, or leave the parameter out"
        )
    if specialized.product is not None and len(shape) < 2:
        raise ValueError(
            f"a parameter has shape {tuple(shape)}, and the rule {name} orthogonalizes matrices; do so under "
            "`if matrix:`, or leave the parameter out"
        )
    if specialized.product is not None and specialized.is_factored and len(shape) > 3:
        raise ValueError(
            f"a parameter has shape {tuple(shape)}: orthogonalized() sees {shape[0]} rows, and values by row or column "
            f"of {name} see others, of {shape[-1]} elements; flatten all dimensions but the first in the model, or "
            "put the parameter into a group with other flags"
        )


def check_step_counts(known: Mapping[Tensor, StateDict]) -> None:
    for state in known.values():
        checks.one_number("state 'step'", state.get("step", 0.0))
        if state and "step" not in state:
            raise RuntimeError("a state has moments but no 'step': how often was it updated? Load it with its step")


def _fresh_states(p: Participant, state: Mapping[str, Any]) -> StateDict:
    """States that are missing, and new copies of states whose format, layout or device is no longer the parameter's.
    Kernels use all of them in place: a copy that a launch makes of a state in host memory would be out of their reach.
    """
    strides = strides_for(local(p.param), p.chosen.values(), p.specialized, is_dtensor(p.param))
    fresh: StateDict = {} if "step" in state else {"step": 0.0}
    for role in p.specialized.roles:
        arrays = {n: a for n, a in arrays_of(role, p.chosen.get(role)).items() if n not in ("param", "grad")}
        if arrays:
            fresh |= _fresh_arrays(p, role, arrays, state, strides)
    return fresh


def _fresh_arrays(
    p: Participant, role: str, arrays: Mapping[str, Array | None], state: Mapping[str, Any], strides: tuple[int, ...]
) -> StateDict:
    """Of one role. In a function of its own, since what is made on the device and then taken to host memory is freed
    before the next role has any."""
    kept_otherwise = role != "param" and not arrays.keys() >= {*names_in(role, state)}
    blocks = [state.get(name) for name, array in arrays.items() if array is not None and array.by == "block"]
    kept_otherwise |= any(_runs_otherwise(value, p.param) for value in blocks)
    is_new = kept_otherwise or not all(_is_kept_as(state.get(name), array) for name, array in arrays.items())
    if is_new:
        _wait_for(state)
    found = p.new_state(role, dict(state)) if is_new else state
    fresh: StateDict = {**found} if is_new else {}
    param, by = local(p.param), p.specialized.rule.spaces[role]
    for name, array in arrays.items():
        if not is_new:
            dtypes = checks.dtypes_like(param, by) if array is None else [array.dtype]
            checks.tensor(f"state {name!r}", state[name], dtypes)
            checks.sharded_as_param(f"state {name!r}", state[name], p.param, by)
        here = local(found[name])
        by_block = array is not None and array.by == "block"
        shape = p.smaller_shapes.get(name, param.shape)
        wanted = row_major_strides(here) if by_block or by != "element" else strides
        is_ready = p.is_at_home(here) and has_strides(here, wanted) and is_plain(here)
        if here.shape == shape and not is_ready:
            _wait_for(state)
            copy = p.brought_home(here, wanted, is_new)
            alike = found[name]
            if not has_strides(here, wanted):
                alike = sharded_blocks(p.param, copy) if by_block else with_local_in(by, p.param, copy)
            fresh[name] = with_shard(alike, copy)
    return fresh


def _wait_for(state: Mapping[str, Any]) -> None:
    """Before states are read here that kernels may still write."""
    if slabs_of(state.values()):
        host_memory.wait()


def _is_kept_as(value: Any, array: Array | None) -> bool:
    """Whether a state is there in the wanted format. Anything else than a tensor is left to be refused."""
    return value is not None and (array is None or not isinstance(value, Tensor) or value.dtype == array.dtype)


def _runs_otherwise(blocks: Any, param: Tensor) -> bool:
    """Whether an array by block is from before the parameter's memory format was changed, as by model.to()."""
    if not isinstance(blocks, Tensor) or is_dtensor(param):
        return False
    return blocks.shape == block_shape(param.shape, not is_channels_last(param)) != local_block_shape(param)


def arrays_of(role: str, fmt: str | None) -> dict[str, Array | None]:
    """The arrays of a role in a format; None: one tensor of any dtype."""
    return {role: None} if fmt is None else {**FORMATS[fmt].arrays_of(role)}
