"""What torch's ways to train on many devices ask of an optimizer, beyond DTensors (shards.py): FSDP, ZeRO, GradScaler.

Some can only be detected from the call stack.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedadam.rules.rule import SpecializedRule
from fusedadam.tensors.shards import is_dtensor, sharding_of
from fusedadam.tensors.storage import STORAGES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fusedadam.optimizers.base import FusedOptimizer

ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
CHECKPOINT = "torch.distributed.checkpoint.state_dict"


def is_waited_for(param: Tensor, special: SpecializedRule) -> bool:
    """Whether other processes, which have parts of this parameter, cannot do without what this one adds to sums.

    Whether it requires a gradient is not asked: another process may still have one from before it was frozen.
    """
    return special.has_sums and param.dtype in STORAGES and sharding_of(param) is not None


def found_anywhere(found_inf: Tensor, meshes: Iterable[DeviceMesh]) -> Tensor:
    """A step is skipped by all processes that have parts of the same parameters, or by none."""
    import torch.distributed as dist

    from fusedadam.engine.reduction import group_of

    for mesh in meshes:
        found_inf = found_inf.detach().to(mesh.device_type, torch.float32, copy=True)
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group_of(mesh))
    return found_inf


def only_wants_states() -> bool:
    """Whether torch.distributed.checkpoint has called step(), with gradients of zero, to see which states there are.

    It means no step: nothing is to be counted, and nothing to be averaged.
    """
    return any(name == "_init_optim_state" and module == CHECKPOINT for module, name in _callers(12))


def made_by_zero() -> bool:
    return any(module == ZERO for module, _ in _callers(8))


def are_flat(params: Iterable[Tensor]) -> bool:
    """Whether FSDP's first version has made one vector of them, of which each process has a part."""
    return any(getattr(param, "_fsdp_flattened", False) for param in params)


def check_not_flat(params: Iterable[Tensor], optimizer: FusedOptimizer) -> None:
    """Refuses rules that sum on flat parameters, which have neither rows nor an end."""
    if are_flat(params) and optimizer.sums():
        raise ValueError(
            f"{type(optimizer).__name__} sums over parameters and their rows, which FullyShardedDataParallel has "
            "flattened and divided; shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead, or use an "
            "optimizer, and options, without norms and projections"
        )


def check_has_all_averages(optimizer: FusedOptimizer) -> None:
    """Refuses to put averages into a model of which some parts would stay as they are."""
    if are_flat(optimizer._params()):
        raise RuntimeError(
            "FullyShardedDataParallel keeps weights that it has gathered, so averages would not reach the model; shard "
            "it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if optimizer._has_a_part:
        raise RuntimeError(
            "ZeroRedundancyOptimizer gives each process some of the parameters, and so some of the averages only; use "
            "EmaAdamW itself, or shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def fsdp_modules(params: Iterable[Tensor]) -> list[Any]:
    """The modules of FSDP2 (``fully_shard``) that gather these parameters for a forward pass."""
    registry = sys.modules.get("torch.distributed._composable_state")
    fully_shard = sys.modules.get("torch.distributed.fsdp")
    if registry is None or fully_shard is None:
        return []
    mine = {id(param) for param in params if is_dtensor(param)}
    modules = [m for m in list(registry._module_state_mapping) if mine and isinstance(m, fully_shard.FSDPModule)]
    return [m for m in modules if any(id(p) in mine for p in _sharded_params(m))]


def gather_anew(modules: Iterable[Any]) -> None:
    """What a forward pass has gathered is let go (the outermost module of FSDP2 keeps it), so that the next one sees
    weights that have been changed since."""
    for module in modules:
        module.reshard()


def _sharded_params(module: Any) -> list[Tensor]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [one.sharded_param for group in groups if group is not None for one in group.fsdp_params]


def _callers(depth: int) -> Iterable[tuple[str, str]]:
    """Modules and functions, from the inside."""
    frame: Any = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            return
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back
