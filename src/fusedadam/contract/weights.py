"""The weights of a model as float32, and back: bfloat16 weights joined with their low-order bits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusedadam.contract import conversion, refusals, role_arrays, storage
from fusedadam.formats import FORMATS
from fusedadam.formats.tensors import store
from fusedadam.tensors import host_memory
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
    host_memory.wait()

    def value_of(param: Tensor) -> Tensor | None:
        if is_lazy(param) or not param.is_floating_point() or param.dtype == torch.float64:
            return None
        weight = role_arrays.weight_of(param, optimizer.state.get(param, {}))
        return with_local(param.detach(), weight.to(torch.float32, copy=True))

    return replaced(optimizer, model, value_of, "float32 values", "remove the hook, or save the optimizer's state dict")


@torch.no_grad()
def load_float32(optimizer: FusedOptimizer, model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Loads float32 weights into a model, and the bits that do not fit into its own weights into the states. If the
    model refuses them, its weights and the states are as they were."""
    host_memory.wait()
    names = names_of(optimizer, model)
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    targets = {memory_of(param): param for param in names if param in group_of}
    entries = {name: e for name, e in model.state_dict().items() if isinstance(e, Tensor)}
    split: dict[Tensor, tuple[Tensor, Tensor]] = {}
    given: Any = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):  # the versions of the modules
        given._metadata = state_dict._metadata
    for name, value in state_dict.items():  # everything is made before anything is written
        param = targets.get(memory_of(entries[name])) if name in entries else None
        if param is None or is_lazy(param) or not isinstance(value, Tensor) or value.shape != param.shape:
            continue  # left to model.load_state_dict
        if is_dtensor(param):
            given[name] = value = distributed_like(value.detach(), param)  # the model would refuse a whole tensor
        formats = optimizer.storage_of(group_of[param], param).formats
        fmt = FORMATS[formats["param"]] if "param" in formats else None
        if fmt is not None and len(fmt.arrays) == 2:
            here = local(param.detach())
            value = local(value.detach()).to(here.device, torch.float32)
            high, low = (torch.empty_like(here, dtype=array.dtype) for array in fmt.arrays)
            store(fmt, [high, low], value)
            split[param] = high, with_local(param, low)
            given[name] = entries[name]  # written below, if the model takes the rest
    written = [t for t in (*model.parameters(), *model.buffers()) if t not in split and not is_lazy(t)]
    before = [tensor.detach().clone() for tensor in written]
    try:
        model.load_state_dict(given)
    except BaseException:  # torch loads what fits, and only then refuses the rest
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
        raise
    for param in targets.values():
        optimizer.state.get(param, {}).pop(role_arrays.LOW, None)  # they were another weight's
    for param, (high, low) in split.items():
        local(param).copy_(high)
        optimizer.state[param][role_arrays.LOW] = low
    optimizer._stepper.forget_plans()
    for param in targets.values():
        if param in split or (param.requires_grad and not is_lazy(param)):
            complete(optimizer, group_of[param], param)


def complete(optimizer: FusedOptimizer, group: dict[str, Any], param: Tensor) -> None:
    """Makes the states that a parameter lacks, so that a state dict is complete before the first step. Of one that is
    not trained, only the step count."""
    state, roles = optimizer.state[param], optimizer.specialized(group, param).roles
    formats = optimizer.storage_of(group, param).formats
    state.setdefault("step", torch.zeros((), device="cpu"))
    for role in roles if param.requires_grad else ():
        if role in optimizer.states and role_arrays.kept_as(role, state, optimizer.states) is None:
            optimizer._copies.begin(role, param, state, optimizer.states)
            made = role_arrays.new_arrays(role, param, group, formats.get(role), optimizer.states, state)
            if refusals.offloads(group, param.device):
                made = {name: optimizer._stepper.host.placed(value, param.device) for name, value in made.items()}
            state.update(made)


def widened(states: storage.States, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with every state as one plain tensor; without the low bits of parameters, which are no state."""
    host_memory.wait()  # it may share memory with an optimizer that has stepped since
    wide, keys = dict(state_dict["state"]), conversion.keys_of_params(state_dict)
    for key in wide.keys() & keys:
        state = {name: role_arrays.from_state_dict(name, value) for name, value in wide[key].items()}
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
