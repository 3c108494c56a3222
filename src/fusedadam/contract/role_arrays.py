"""The arrays that a role is kept in: made anew, read as float32, and converted from one format to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.contract.declarations import Group
from fusedadam.contract.storage import States, may_hold
from fusedadam.formats import FORMAT_OF_DTYPE, FORMATS, Array, Format, names_in
from fusedadam.formats.tensors import from_bytes, in_bytes, join_low, load, split_of, store
from fusedadam.tensors.complex_numbers import part_dtype
from fusedadam.tensors.factored import shape_in
from fusedadam.tensors.layout import ordered_strides, row_major_strides
from fusedadam.tensors.shards import (
    is_dtensor,
    local,
    local_block_shape,
    local_shape,
    sharded_blocks,
    with_local,
    with_shape,
)

LOW = "param_low"


def kept_as(role: str, state: Mapping[str, Any], states: States) -> Format | None:
    """The format that a state is kept in, or None if it is not there."""
    if not state:  # as before the first step, of perhaps thousands of parameters
        return None
    for fmt in FORMATS.values():
        arrays = fmt.arrays_of(role).items()
        is_named = any(array.suffix for array in fmt.arrays)  # by more than the role
        if (
            is_named
            and may_hold(fmt, role, states)
            and all(_is_array(state.get(name), array) for name, array in arrays)
        ):
            return fmt
    value = state.get(role)
    plain = FORMAT_OF_DTYPE.get(part_dtype(value.dtype)) if isinstance(value, Tensor) else None
    return None if plain is None else FORMATS[plain]


def _is_array(value: Any, array: Array) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.dtype == array.dtype or (array.dtype == torch.int16 and value.dtype == torch.uint8)  # pairs of bytes


def value_of(role: str, state: Mapping[str, Any], states: States) -> Tensor | None:
    """A state as a plain local tensor: float32, unless it is kept as a plain tensor of another dtype."""
    fmt = kept_as(role, state, states)
    if fmt is None:
        return None
    arrays = [local(state[name]) for name in fmt.array_names(role)]
    return arrays[0] if fmt.is_one_tensor else load(fmt, arrays, torch.float32)


def weight_of(param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The local part of a parameter; with the low bits, if they are kept, as float32."""
    here: Tensor = local(param.detach())
    low = state.get(LOW)
    if low is None or here.dtype == torch.float16:
        return here
    if here.dtype != torch.bfloat16:  # it has become wider, and takes its low bits in with the next step
        here = here.clone()
        join_low(here, local(low))
        return here
    return load(split_of(low), [here, local(low).to(here.device)], torch.float32)


def new_arrays(
    role: str, param: Tensor, group: Group, fmt: str | None, states: States, before: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The arrays of a role in a format: from what is there before, rounded to nearest, or with the initial value. None:
    a plain tensor of the dtype that the option names; without it, of what is there before, decoded, else the
    parameter's."""
    if role == "param":
        return {} if fmt is None or len(FORMATS[fmt].arrays) == 1 else {LOW: _low(param, FORMATS[fmt], before)}
    declared, value = states[role], value_of(role, before, states)
    check_whole(role, before, value)
    if value is not None:
        _check_shape(role, value, param, declared.by)
    for name in names_in(role, before) if value is not None else ():
        checks.sharded_as_param(f"state {name!r}", before[name], param, declared.by)
    if fmt is None or declared.by != "element":  # smaller states are plain, in any storage
        dtype = FORMATS[fmt].arrays[0].dtype if fmt is not None else declared.dtype_in(group)
        if dtype is None and value is not None:  # decoded, perhaps to more bits than the parameter has
            dtype = value.dtype
        made = declared.new(param, {**group, declared.dtype_option: dtype})
        if value is not None:
            local(made).copy_(value)
        return {role: made}
    if value is None and declared.initial != "zero":
        is_copy = declared.initial == "param"
        value = weight_of(param, before) if is_copy else torch.ones_like(local(param.detach()), dtype=torch.float32)
    return encoded(role, param, FORMATS[fmt], value)


def check_whole(role: str, state: Mapping[str, Any], value: Any) -> None:
    """Refuses a state of which only a part is there, or that is of no known dtype."""
    found = names_in(role, state)
    if value is None and found:
        raise RuntimeError(
            f"state {role!r} cannot be read: it has {', '.join(map(repr, found))}, of which a part is missing or of "
            "another dtype; load it again, or delete all of it to begin anew"
        )


def _check_shape(name: str, value: Tensor, param: Tensor, by: str = "element") -> None:
    if by == "element":
        if value.shape != (here := local(param).shape):
            raise RuntimeError(
                f"state {name!r} has shape {tuple(value.shape)}, but its param has {tuple(here)}; they must be equal"
            )
    elif value.shape != (wanted := shape_in(by, local_shape(param))):
        raise RuntimeError(
            f"state {name!r} has shape {tuple(value.shape)}, but with one value for each {by} of its param it must "
            f"have {tuple(wanted)}"
        )


def encoded(role: str, param: Tensor, fmt: Format, value: Tensor | None, device: Any = None) -> dict[str, Tensor]:
    """New arrays with a value, or zeros, sharded like the parameter, and on its device unless another is given."""
    here = local(param.detach())
    device = here.device if device is None else device
    arrays = []
    for array in fmt.arrays:
        if array.by == "block":
            arrays.append(torch.zeros(local_block_shape(param), dtype=array.dtype, device=device))
        elif fmt.is_deferred:
            strides = row_major_strides(here) if is_dtensor(param) else ordered_strides(here)
            arrays.append(torch.empty_strided(here.shape, strides, dtype=array.dtype, device=device).zero_())
        else:
            arrays.append(torch.zeros_like(here, dtype=array.dtype, device=device, requires_grad=False))
    if value is not None and here.numel():
        store(fmt, arrays, value.to(device))
    wrapped = [
        sharded_blocks(param, tensor) if array.by == "block" else with_local(param, tensor)
        for array, tensor in zip(fmt.arrays, arrays, strict=True)
    ]
    return dict(zip(fmt.array_names(role), wrapped, strict=True))


def loaded_as(
    param: Tensor, state: dict[str, Any], group: Group, formats: Mapping[str, str], states: States
) -> dict[str, Any]:
    """A loaded state in the wanted formats, where it is. Roles without one become plain tensors."""
    converted = dict(state)
    for role in states:
        fmt = kept_as(role, state, states)
        if fmt is None:
            continue
        if states[role].by != "element":  # plain in every file, and converted by the next step
            continue
        wanted = FORMATS[formats[role]] if role in formats else None
        if (wanted is None and fmt.is_one_tensor) or (wanted is not None and wanted.arrays == fmt.arrays):
            continue
        value = value_of(role, state, states)
        assert value is not None
        if wanted is not None and wanted.holds == "non-negative" and bool((value < 0).any()):
            raise ValueError(
                f"the state dict has negative values in {role!r}, which are never negative; is it another optimizer's?"
            )
        for name in fmt.array_names(role):
            del converted[name]
        plain = FORMAT_OF_DTYPE[states[role].dtype_in(group) or value.dtype]  # as new_arrays decides
        converted |= encoded(role, param, wanted or FORMATS[plain], value, value.device)
    if LOW in converted:
        wanted_low = FORMATS[formats["param"]] if "param" in formats else None
        if wanted_low is not None and len(wanted_low.arrays) > 1:
            converted[LOW] = _low(param, wanted_low, converted, local(converted[LOW]).device)
        elif param.dtype not in (torch.float32, torch.float64):  # these take them in, with their next step
            del converted[LOW]
    return converted


def for_state_dict(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a state dict has of a state: low bits of 16 as pairs of bytes, which every process group can send."""
    wide = {n: v for n, v in state.items() if n.endswith("_low") and isinstance(v, Tensor) and v.dtype == torch.int16}
    return {**state, **{name: with_shape(low, in_bytes(local(low)), (*low.shape, 2)) for name, low in wide.items()}}


def from_state_dict(name: str, value: Any) -> Any:
    """An array as the optimizer keeps it."""
    if not name.endswith("_low") or not isinstance(value, Tensor) or value.dtype != torch.uint8:
        return value
    return with_shape(value, from_bytes(local(value)), value.shape[:-1])


def refresh_copy(role: str, param: Tensor, state: Mapping[str, Any], states: States, is_new: Tensor) -> None:
    """Makes a state that is a copy of the parameter equal to it, in place, if ``is_new``, which is not waited for."""
    fmt = kept_as(role, state, states)
    arrays = [] if fmt is None else [local(state[name]) for name in fmt.array_names(role)]
    if fmt is None or arrays[0].shape != local(param).shape:  # the next step refuses another shape
        return
    device = local(param).device  # and not the array's: in host memory, it is read and written in the stream's order
    is_new = is_new.to(device, non_blocking=True)
    fresh = [torch.empty_like(array, device=device) for array in arrays]
    store(fmt, fresh, weight_of(param, state))
    for array, new in zip(arrays, fresh, strict=True):
        array.copy_(torch.where(is_new, new, array.to(device, non_blocking=True)), non_blocking=True)


def _low(param: Tensor, fmt: Format, before: Mapping[str, Any], device: Any = None) -> Tensor:
    """The low bits of a weight: zeros, unless there were some, of which 8 bits are the upper half of 16."""
    dtype, known = fmt.arrays[1].dtype, before.get(LOW)
    here = local(param.detach())
    if not isinstance(known, Tensor):
        return with_local(param, torch.zeros_like(here, dtype=dtype, requires_grad=False))
    low = local(known).to(here.device if device is None else device)
    if low.dtype == torch.uint8:
        low = from_bytes(low)
    if low.dtype != dtype:
        wide = low.to(torch.int32)
        low = (wide << 8 if dtype == torch.int16 else ((wide + 0x80) >> 8).clamp(max=127)).to(dtype)
    _check_shape(LOW, low, param)
    made = torch.empty_like(here, dtype=dtype, device=low.device, requires_grad=False)
    return with_local(param, made.copy_(low))
