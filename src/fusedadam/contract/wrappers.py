"""What the wrappers around an optimizer expect of it: FSDP, ZeRO, distributed checkpoints, GradScaler, Lightning.

torch and Lightning call an optimizer for several reasons, which only the call stack tells apart. Each probe of it names
the function that it looks for, and the versions in which it was found there. If a later version renames it, the probe
answers False, and the tests of ZeRO, distributed checkpoints and Lightning fail. DTensors are in tensors/shards.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedadam.engine.exchange import is_exchanged
from fusedadam.formats import FORMAT_OF_DTYPE
from fusedadam.rules.rule import SpecializedRule
from fusedadam.tensors.complex_numbers import part_dtype
from fusedadam.tensors.shards import is_dtensor, sharding_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fusedadam.contract.base import FusedOptimizer


def zero_creates_optimizer() -> bool:
    """Whether ZeroRedundancyOptimizer is creating its local optimizer, which gets only some of the parameters.

    ``ZeroRedundancyOptimizer._init_local_optimizer``; torch 2.6 to 2.15.
    """
    return ("torch.distributed.optim.zero_redundancy_optimizer", "_init_local_optimizer") in _callers()


def checkpoint_creates_states() -> bool:
    """Whether torch.distributed.checkpoint calls ``step()`` with gradients of zero, so that states come into being.

    It means no step: nothing is counted, and no average moves. ``_init_optim_state``; torch 2.6 to 2.15.
    """
    return ("torch.distributed.checkpoint.state_dict", "_init_optim_state") in _callers()


def lightning_asks_about_unscaling() -> bool:
    """Whether Lightning reads ``_step_supports_amp_scaling``, in order to decide whether it may clip.

    ``_optimizer_handles_unscaling``, in ``lightning_fabric.plugins.precision.amp`` of pytorch-lightning 2.6, and in
    ``lightning.fabric.plugins.precision.amp`` where the same code is installed as ``lightning``.
    """
    module, function = next(caller for caller in _callers() if not caller[0].startswith("fusedadam."))
    return module.startswith(("lightning_fabric.", "lightning.")) and function == "_optimizer_handles_unscaling"


def _callers() -> Iterator[tuple[str, str]]:
    """The module and the function of each frame on the stack, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


def is_waited_for(param: Tensor, specialized: SpecializedRule) -> bool:
    """Whether other processes, which have shards of this parameter, wait for this one's contribution to sums, or for
    its part of a matrix.

    ``requires_grad`` does not matter: another process may still have a gradient from before the parameter was frozen.
    """
    if part_dtype(param.dtype) not in FORMAT_OF_DTYPE or sharding_of(param) is None:
        return False
    return specialized.has_sums or (specialized.product is not None and is_exchanged(param))


@contextlib.contextmanager
def zero_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """Gradients of zero, for one step, of parameters that have none here, but on other processes."""
    try:
        for param in params:
            param.grad = torch.zeros_like(param)
        yield
    finally:
        for param in params:
            param.grad = None


def found_anywhere(found_inf: Tensor, meshes: Iterable[DeviceMesh]) -> Tensor:
    """Whether any process with shards of the same parameters has found an infinity: all of them skip, or none."""
    import torch.distributed as dist

    from fusedadam.engine.reduction import group_of

    for mesh in meshes:
        found_inf = found_inf.detach().to(mesh.device_type, torch.float32, copy=True)
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group_of(mesh))
    return found_inf


def are_flat(params: Iterable[Tensor]) -> bool:
    """Whether FSDP1 has flattened parameters into one vector, of which each process has a shard."""
    return any(getattr(param, "_fsdp_flattened", False) for param in params)


def check_has_all_averages(optimizer: FusedOptimizer) -> None:
    """Refuses to put averages into a model if some weights would stay as trained."""
    if are_flat(optimizer._params()):
        raise RuntimeError(
            "FullyShardedDataParallel keeps weights that it has gathered, so averages would not reach the model; shard "
            "it with torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if optimizer._is_under_zero:
        raise RuntimeError(
            "ZeroRedundancyOptimizer gives each process some of the parameters, and so only some of the averages; use "
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


def drop_gathered(modules: Iterable[Any]) -> None:
    """Drops gathered weights, which the outermost module of FSDP2 keeps, so that the next forward pass sees changes."""
    for module in modules:
        module.reshard()


def _sharded_params(module: Any) -> list[Tensor]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [wrapped.sharded_param for group in groups if group is not None for wrapped in group.fsdp_params]
