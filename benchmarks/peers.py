"""What ours are measured against: called with parameters and options, each gives an object with ``step()``.

Tables show them by their names. The loops are those of the demo, and are tested with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fusedadam
from fusedadam.cli.peers import BertAdamLoop, TorchAdamWWithEma, adamp_package
from fusedadam.optimizers.base import FusedOptimizer
from fusedadam.optimizers.declarations import State
from fusedadam.rules.rule import Value, Values, rule

__all__ = [
    "BertAdamLoop",
    "Missing",
    "TorchAdamWWithEma",
    "adamp",
    "clip_then_fused",
    "fused_on_dtensors",
    "our_adamp",
    "our_adamp_on_dtensors",
    "our_adamw",
    "our_adamw_on_dtensors",
    "our_adamw_scaled",
    "our_adamw_unscaled",
    "our_clip_grad_norm_",
    "same_bytes_no_mathematics",
    "torch_clip_grad_norm_",
    "torch_fused",
    "torch_fused_scaled",
]

Params = list[torch.nn.Parameter]


class Missing(Exception):
    """A peer that cannot be measured here; the message says why."""


def torch_fused(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **options)


def torch_fused_scaled(params: Params, **options: Any) -> torch.optim.Optimizer:
    return _scaled(torch_fused(params, **options))


def our_adamw_scaled(params: Params, **options: Any) -> torch.optim.Optimizer:
    return _scaled(fusedadam.AdamW(params, **options))


def our_adamw_unscaled(params: Params, **options: Any) -> torch.optim.Optimizer:
    return fusedadam.AdamW(params, **options)


def _scaled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As torch.amp.GradScaler hands gradients to an optimizer that can take them as they are."""
    device = optimizer.param_groups[0]["params"][0].device
    setattr(optimizer, "grad_scale", torch.ones((), device=device))  # noqa: B010  torch does not declare them
    setattr(optimizer, "found_inf", torch.zeros((), device=device))  # noqa: B010
    return optimizer


def our_adamw_on_dtensors(params: Params, **options: Any) -> FusedOptimizer:
    return fusedadam.AdamW(_divided(params), **options)


def our_adamp_on_dtensors(params: Params, **options: Any) -> FusedOptimizer:
    return fusedadam.AdamP(_divided(params), **options)


def our_adamw(params: Params, **options: Any) -> FusedOptimizer:
    return fusedadam.AdamW(params, **options)


def our_adamp(params: Params, **options: Any) -> FusedOptimizer:
    return fusedadam.AdamP(params, **options)


def fused_on_dtensors(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch_fused(_divided(params), **options)


def _divided(params: Params) -> list[torch.nn.Parameter]:
    """The same as DTensors, of which one process has everything: what is measured is what they cost on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    given = list(params)
    kind = given[0].device.type
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    mesh = init_device_mesh(kind, (1,))
    divided = []
    for param in given:
        divided.append(torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
        divided[-1].grad = distribute_tensor(param.grad, mesh, [Shard(0)])
    return divided


def adamp(params: Params, **options: Any) -> torch.optim.Optimizer:
    """AdamP as its authors published it."""
    package = adamp_package()
    if package is None:
        raise Missing("adamp is not installed")
    made: torch.optim.Optimizer = package(params, **options)
    return made


class ClipThenFused:
    """Clipping by the global norm as most people do it: torch's clip_grad_norm_, then torch's fused AdamW."""

    def __init__(self, params: Params, max_grad_norm: float, **options: Any) -> None:
        self.params, self.max_grad_norm = params, max_grad_norm
        self.optimizer = torch_fused(params, **options)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, self.max_grad_norm)
        self.optimizer.step()


def clip_then_fused(params: Params, **options: Any) -> ClipThenFused:
    return ClipThenFused(params, **options)


class Clipping:
    """Clipping alone. The limit falls from call to call, so that there is something to clip each time."""

    def __init__(self, clip: Callable[[Params, float], object], params: Params) -> None:
        self.clip, self.params, self.max_norm = clip, params, 1.0

    def step(self) -> None:
        self.clip(self.params, self.max_norm)
        self.max_norm *= 0.999


def our_clip_grad_norm_(params: Params) -> Clipping:
    return Clipping(fusedadam.clip_grad_norm_, params)


def torch_clip_grad_norm_(params: Params) -> Clipping:
    return Clipping(torch.nn.utils.clip_grad_norm_, params)


@rule(scalars=lambda step: {})
def no_mathematics(param: Value, grad: Value, exp_avg: Value, exp_avg_sq: Value) -> Values:
    """Reads and writes what AdamW reads and writes."""
    before = param
    param = exp_avg + grad
    exp_avg = exp_avg_sq
    exp_avg_sq = before
    return param, exp_avg, exp_avg_sq


class NoMathematics(FusedOptimizer):
    rule = no_mathematics
    states = {"exp_avg": State(), "exp_avg_sq": State()}

    def __init__(self, params: Params) -> None:
        super().__init__(params)


def same_bytes_no_mathematics(params: Params) -> NoMathematics:
    return NoMathematics(params)
