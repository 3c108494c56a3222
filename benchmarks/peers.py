"""What speed.py and small.py measure beside plain optimizers: scaled gradients, DTensors, clipping and others.

Each is called with parameters and options and returns an object with ``step()``; tables show its ``__name__``.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch

import fusedadam
from fusedadam.cli.contestants import PEERS
from fusedadam.cli.harness.processes import Failed
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.declarations import State
from fusedadam.rules.rule import Value, Values, rule

Params = list[torch.nn.Parameter]
Make = Callable[..., Any]


def torch_fused(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **options)


def torch_sgd(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, fused=True, **options)


def torch_rmsprop(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, foreach=True, **options)  # there is no fused one


def torch_adadelta(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(params, foreach=True, **options)  # there is no fused one


def torch_radam(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.RAdam(params, foreach=True, **options)  # there is no fused one


def torch_nadam(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, foreach=True, **options)  # there is no fused one


def torch_adafactor(params: Params, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, foreach=True, **options)  # there is no fused one


def packaged(package: str, name: str, **always: Any) -> Make:
    """The class ``name`` of another package, with options that make it as fast as it gets."""

    def made(params: Params, **options: Any) -> torch.optim.Optimizer:
        if importlib.util.find_spec(package) is None:
            raise Failed(f"{package} is not installed")
        optimizer: torch.optim.Optimizer = getattr(importlib.import_module(package), name)(params, **always, **options)
        return optimizer

    made.__name__ = package.replace("_", "-")
    return made


adamp = packaged("adamp", "AdamP")  # as its authors published it


def transformers_adafactor(params: Params, **options: Any) -> torch.optim.Optimizer:
    """With a learning rate that is relative to the parameters, as ours."""
    if importlib.util.find_spec("transformers") is None:
        raise Failed("transformers is not installed")
    module = importlib.import_module("transformers.optimization")
    made: torch.optim.Optimizer = module.Adafactor(
        params, lr=1e-2, scale_parameter=True, relative_step=False, warmup_init=False, **options
    )
    return made


transformers_adafactor.__name__ = "transformers"


def scaled(make: Make) -> Make:
    """With scaled gradients, as torch.amp.GradScaler passes them to an optimizer that can unscale them itself. Both
    leave them unscaled, so the scale is -1: gradients that are used again must not become smaller and smaller."""

    def made(params: Params, **options: Any) -> Any:
        optimizer, device = make(params, **options), params[0].device
        optimizer.grad_scale, optimizer.found_inf = -torch.ones((), device=device), torch.zeros((), device=device)
        return optimizer

    made.__name__ = f"{make.__name__}, scaled"
    return made


def skipping(make: Make) -> Make:
    """Ours, with a look at every gradient before the step."""

    def made(params: Params, **options: Any) -> Any:
        return make(params, skip_nonfinite=True, **options)

    made.__name__ = f"{make.__name__}, skip_nonfinite"
    return made


def schedule_free(params: Params, **options: Any) -> Any:
    """The authors', with foreach."""
    (peer,) = PEERS["ScheduleFreeAdamW"]
    if not peer.installed:
        raise Failed(f"{peer.package} is not installed")
    return peer.make(params, **options)


def with_tensor_lr(make: Make) -> Make:
    """With a learning rate on the parameters' device."""

    def made(params: Params, **options: Any) -> Any:
        return make(params, lr=torch.tensor(1e-3, device=params[0].device), **options)

    made.__name__ = f"{make.__name__}, tensor lr"
    return made


def scheduled(make: Make) -> Make:
    """With a learning rate that changes before every step, as most schedulers do it."""

    def made(params: Params, **options: Any) -> Any:
        optimizer = make(params, **options)
        step, numbers = optimizer.step, itertools.count(1)

        def next_step() -> None:
            optimizer.param_groups[0]["lr"] = 1e-3 / next(numbers)
            step()

        optimizer.step = next_step
        return optimizer

    made.__name__ = f"{make.__name__}, scheduled"
    return made


def on_dtensors(make: Make) -> Make:
    """With DTensors in a single process, which measures what they cost on the host."""

    def made(params: Params, **options: Any) -> Any:
        return make(_sharded(params), **options)

    made.__name__ = f"{make.__name__}, DTensors"
    return made


def _sharded(params: Params) -> Params:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    kind = params[0].device.type
    if not dist.is_initialized():
        backends = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(kind, (1,))
    sharded = []
    for param in params:
        assert param.grad is not None
        sharded.append(torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))
        sharded[-1].grad = distribute_tensor(param.grad, mesh, [Shard(0)])
    return sharded


class clip_then_fused:
    """Clipping by the global norm as most people do it: torch's clip_grad_norm_, then torch's fused AdamW."""

    def __init__(self, params: Params, max_grad_norm: float, **options: Any) -> None:
        self.params, self.max_grad_norm, self.optimizer = params, max_grad_norm, torch_fused(params, **options)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, self.max_grad_norm)
        self.optimizer.step()


class Clipping:
    """Clipping alone. The limit falls from call to call, so that there is always something to clip."""

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
