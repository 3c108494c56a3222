"""Saving and loading state dicts, by hooks around torch's own methods. A load that fails changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedadam import compat
from fusedadam.contract import conversion, refusals, storage
from fusedadam.contract.group_options import for_check
from fusedadam.contract.role_arrays import LOW, for_state_dict
from fusedadam.contract.weights import complete
from fusedadam.tensors import host_memory

if TYPE_CHECKING:
    from fusedadam.contract.base import FusedOptimizer


@contextlib.contextmanager
def saving(optimizer: FusedOptimizer) -> Iterator[None]:
    """Adds torch's own entry about weight decay, which tells Adam's state dicts from AdamW's, and makes low bits what
    every process group can gather."""

    def as_saved(_: Any, state_dict: dict[str, Any]) -> None:
        state, keys = state_dict["state"], conversion.keys_of_params(state_dict)
        state_dict["state"] = {key: for_state_dict(_apart(v)) if key in keys else v for key, v in state.items()}
        if "decoupled" in optimizer.rule.flags:
            for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
                saved["decoupled_weight_decay"] = bool(optimizer.value(group, "decoupled"))

    hook = optimizer.register_state_dict_post_hook(
        as_saved, prepend=True
    )  # before the user's, which may return anything
    try:
        yield
    finally:
        hook.remove()


def _apart(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state for torch's asynchronous checkpoints, which in some versions share tensors on the host."""
    if not compat.checkpoints_share_host_memory():
        return state
    return {n: v if host_memory.slab_of(v) is None else v.clone() for n, v in state.items()}


@contextlib.contextmanager
def loading(optimizer: FusedOptimizer, state_dict: Any) -> Iterator[None]:
    """Converts and checks what torch is about to load; keeps dtypes, and options that the state dict does not have."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict is a {type(state_dict).__name__}; it must be what optimizer.state_dict() returned; open "
            "a file with torch.load first"
        )
    state, groups, copies = optimizer.state, optimizer.param_groups, optimizer._copies
    before = [dict(group) for group in groups]
    host_memory.wait()  # it may share memory with an optimizer that has stepped since
    loaded: dict[str, Any] = {}

    def convert(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:  # as the user's own hooks have left it
        loaded.update(_converted(optimizer, state_dict))
        # torch would make copies in the parameters' dtype
        keys = conversion.keys_of_params(loaded)
        return {**loaded, "state": {key: {} if key in keys else value for key, value in loaded["state"].items()}}

    def keep_dtypes(_: Any) -> None:
        group_of = {param: group for group in before for param in group["params"]}
        saved = [key for group in loaded["param_groups"] for key in group["params"]]
        for key, param in zip(saved, optimizer._params(), strict=True):
            for name, value in loaded["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    value = value.detach()
                    if name != "step" and refusals.offloads(group_of[param], param.device):
                        value = optimizer._stepper.host.placed(value, param.device)
                    else:
                        device = torch.device("cpu") if name == "step" else param.device
                        value = value.to(device, copy=True)
                optimizer.state[param][name] = value
        for group, ours, theirs in zip(optimizer.param_groups, before, loaded["param_groups"], strict=True):
            kept = _kept(optimizer, ours)
            group.update({name: ours[name] for name in ours if name not in theirs or name in kept})
            for param in group["params"]:
                # weights stay as they are, and so do their low bits, unless others came
                if LOW in state.get(param, {}) and LOW not in optimizer.state.get(param, {}):
                    optimizer.state[param][LOW] = state[param][LOW]
                    complete(optimizer, group, param)

    try:
        with contextlib.ExitStack() as stack:
            stack.callback(optimizer.register_load_state_dict_pre_hook(convert).remove)
            stack.callback(optimizer.register_load_state_dict_post_hook(keep_dtypes, prepend=True).remove)
            yield
    except BaseException:
        if optimizer.state is not state:  # torch replaces both, and leaves the old ones as they were
            optimizer.state, optimizer.param_groups, optimizer._copies = state, groups, copies
            optimizer._reset()
        raise


def _converted(optimizer: FusedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    conversion.check_is_state_dict(state_dict)
    state_dict = optimizer._of_others(state_dict)
    name, groups = type(optimizer).__name__, optimizer.param_groups
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return state_dict  # torch raises its own error
    merged = []
    for ours, theirs in zip(groups, saved, strict=True):
        kept = {name: ours[name] for name in _kept(optimizer, ours) if name in ours}
        loaded = {name: value for name, value in ours.items() if name not in kept}
        conversion.check_options(theirs, loaded, {**optimizer.fixed, **kept}, name)
        merged.append({**ours, **theirs, **kept, "params": ours["params"]})
        optimizer.check(for_check(merged[-1]))
    return conversion.convert(type(optimizer), state_dict, merged)


def _kept(optimizer: FusedOptimizer, group: Mapping[str, Any]) -> Sequence[str]:
    """The options of a group that no state dict changes: they are choices for this machine, and for this run."""
    return (*optimizer.kept, *(storage.OTHER_DTYPES if group.get("storage") is not None else ()))
