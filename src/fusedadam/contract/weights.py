"""The weights of a model as float32, and back: with the bits that its bfloat16 weights lack, which the states have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusedadam.contract import role_arrays, storage
from fusedadam.formats import FORMATS
from fusedadam.formats.tensors import store
from fusedadam.tensors.shards import distributed_like, is_dtensor, local, memory_of, with_local

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer


def replaced(
    optimizer: FusedOptimizer,
    model: nn.Module,
    value_of: Callable[[Tensor], Tensor | None],
    what: str,
    instead: str,
) -> dict[str, Any]:
    """A copy of the model's state dict with other values for some parameters (None: as it is). Entries are recognized
    by their memory, under any name; tied weights stay tied."""
    # taken first, since under FSDP it reshards the parameters; filled in place, since it has the modules' versions
    state = model.state_dict()
    names = names_of(optimizer, model)
    values = {memory_of(p): (p, value) for p in names if (value := value_of(p)) is not None}
    copies: dict[Tensor, Tensor] = {}
    for name, entry in state.items():
        if isinstance(entry, Tensor):
            param, value = values.get(memory_of(entry), (None, None))
            if param is not None and value is not None:
                state[name] = copies.setdefault(param, value)
            else:
                state[name] = entry.detach().clone()
    lost = [names[param] for param, _ in values.values() if param not in copies and local(param).numel()]
    if lost:
        raise RuntimeError(
            f"the {what} of {', '.join(lost)} have no place in model.state_dict(): a state-dict hook drops, copies or "
            f"changes these weights; {instead}"
        )
    return state


def names_of(optimizer: FusedOptimizer, model: nn.Module) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    if names and not any(param in names for param in optimizer._params()):
        raise ValueError(
            "model has none of this optimizer's parameters (is it a copy of the model that is trained?); pass the "
            "model whose parameters the optimizer was given"
        )
    return names


def float32(optimizer: FusedOptimizer, model: nn.Module) -> dict[str, Any]:
    """A copy of the model's state dict with float32 in place of bfloat16 and float16 weights."""

    def value_of(param: Tensor) -> Tensor | None:
        if is_lazy(param) or not param.is_floating_point() or param.dtype == torch.float64:
            return None
        weight = role_arrays.weight_of(param, optimizer.state.get(param, {}))
        return with_local(param.detach(), weight.to(torch.float32, copy=True))

    return replaced(optimizer, model, value_of, "float32 values", "remove the hook, or save the optimizer's state dict")


@torch.no_grad()
def load_float32(optimizer: FusedOptimizer, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Loads float32 weights into a model, and the bits that do not fit into its own weights into the states."""
    names = names_of(optimizer, model)
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    targets = {memory_of(param): param for param in names if param in group_of}
    entries = {name: targets.get(memory_of(e)) for name, e in model.state_dict().items() if isinstance(e, Tensor)}
    split: dict[Tensor, tuple[Tensor, Tensor]] = {}
    sharded: dict[str, Tensor] = {}  # what the model's own method would refuse as whole tensors
    for name, value in state_dict.items():  # everything is made before anything is written
        param = entries.get(name)
        if param is None or is_lazy(param) or not isinstance(value, Tensor) or value.shape != param.shape:
            continue  # the model's own method has its say about these
        if is_dtensor(param):
            sharded[name] = value = distributed_like(value.detach(), param)
        formats = optimizer.storage_of(group_of[param], param).formats
        fmt = FORMATS[formats["param"]] if "param" in formats else None
        if fmt is not None and len(fmt.arrays) == 2:
            here = local(param.detach())
            value = local(value.detach()).to(here.device, torch.float32)
            high, low = (torch.empty_like(here, dtype=array.dtype) for array in fmt.arrays)
            store(fmt, [high, low], value)
            split[param] = high, with_local(param, low)
    given: Any = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):  # the versions of the modules
        given._metadata = state_dict._metadata
    given.update(sharded)
    optimizer._is_untrained = optimizer._is_untrained or not optimizer.state
    try:
        model.load_state_dict(given)
    finally:  # torch loads what fits, and only then refuses the rest
        for param in targets.values():
            optimizer.state.get(param, {}).pop(role_arrays.LOW, None)  # they were another weight's
        for param, (high, low) in split.items():
            local(param).copy_(high)
            optimizer.state[param][role_arrays.LOW] = low
            optimizer.state[param].setdefault("step", torch.zeros((), device="cpu"))
        optimizer._stepper.forget_plans()
    for param in targets.values():
        if param.requires_grad and not is_lazy(param):
            _complete(optimizer, group_of[param], param)


def _complete(optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor) -> None:
    """Makes the states that a parameter lacks, so that a state dict is complete before the first step."""
    state, roles = optimizer.state[param], optimizer.specialized(group, param).roles
    formats = optimizer.storage_of(group, param).formats
    state.setdefault("step", torch.zeros((), device="cpu"))
    for role in roles:
        if role in optimizer.states and role_arrays.kept_as(role, state, optimizer.states) is None:
            state.update(role_arrays.arrays_of(role, param, group, formats.get(role), optimizer.states, state))


def widened(states: storage.States, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with every state as one plain tensor; without the low bits of parameters, which are no state."""
    wide = {}
    for key, state in state_dict["state"].items():
        state = {name: role_arrays.from_state_dict(name, value) for name, value in state.items()}
        kept = {name: value for name, value in state.items() if name != role_arrays.LOW}
        for role in states:
            fmt = role_arrays.kept_as(role, state, states)
            role_arrays.check_whole(role, state, fmt)
            is_complex = role in state and state[role].is_complex()  # then it is one plain tensor already
            if fmt is not None and fmt.name not in ("f32", "f64") and not is_complex:
                arrays = fmt.array_names(role)
                value = role_arrays.value_of(role, state, states)
                assert value is not None
                whole = with_local(state[arrays[0]], value.float())
                position = list(kept).index(arrays[0])
                items = [(name, v) for name, v in kept.items() if name not in arrays]
                kept = dict([*items[:position], (role, whole), *items[position:]])
        wide[key] = kept
    groups = [{**group, "storage": None} if "storage" in group else group for group in state_dict["param_groups"]]
    return {**state_dict, "state": wide, "param_groups": groups}
