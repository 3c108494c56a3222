"""What speed.py and small.py measure: peers of the catalog, and what an optimizer is measured with besides.

Each is called with parameters and options and returns an object with ``step()``; tables show its ``__name__``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

import fusedadam
from fusedadam.catalog import CATALOG
from fusedadam.cli.harness.processes import Failed
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.declarations import State
from fusedadam.peer import Peer
from fusedadam.rules.rule import Value, Values, rule

Params = list[torch.nn.Parameter]
Make = Callable[..., Any]


def named(name: str) -> Callable[[Make], Make]:
    def rename(make: Make) -> Make:
        make.__name__ = name
        return make

    return rename


def beside(optimizer: str, by: str | None = None) -> Make:
    """What ours is compared with: the peer of this name, or the first plain one in the catalog that is installed."""
    known = [p for p in CATALOG[optimizer].peers if p.name == by or (by is None and not (p.gpu_only or p.low_memory))]
    return _maker(next((peer for peer in known if peer.installed), known[0]))


def _maker(peer: Peer) -> Make:
    @named(peer.name)
    def made(params: Params, **options: Any) -> Any:
        if not peer.installed:
            raise Failed(f"{peer.name} is not installed")
        return peer.make(params, **options)

    return made


torch_fused, adamp = beside("AdamW"), beside("AdamP")
# With a learning rate that is relative to the parameters, as ours. Its weight decay differs, so the catalog lacks it.
RELATIVE = {"lr": 1e-2, "scale_parameter": True, "relative_step": False, "warmup_init": False}
transformers_adafactor = _maker(Peer("transformers", "transformers.optimization:Adafactor", RELATIVE))


def scaled(make: Make) -> Make:
    """With scaled gradients, as torch.amp.GradScaler passes them to an optimizer that can unscale them itself. Both
    leave them unscaled, so the scale is -1: gradients that are used again must not become smaller and smaller."""

    @named(f"{make.__name__}, scaled")
    def made(params: Params, **options: Any) -> Any:
        optimizer, device = make(params, **options), params[0].device
        optimizer.grad_scale, optimizer.found_inf = -torch.ones((), device=device), torch.zeros((), device=device)
        return optimizer

    return made


def skipping(make: Make) -> Make:
    """Ours, with a look at every gradient before the step."""
    return named(f"{make.__name__}, skip_nonfinite")(lambda params, **own: make(params, skip_nonfinite=True, **own))


def capturable(make: Make) -> Make:
    return named(f"{make.__name__}, capturable")(functools.partial(make, capturable=True))


def in_8_bits(make: Make) -> Make:
    """Ours, for peers that keep less than float32."""
    return named(f"{make.__name__}, 8bit")(functools.partial(make, storage="8bit"))


def with_tensor_lr(make: Make) -> Make:
    """With a learning rate on the parameters' device."""
    rate = functools.partial(torch.tensor, 1e-3)
    return named(f"{make.__name__}, tensor lr")(
        lambda params, **own: make(params, lr=rate(device=params[0].device), **own)
    )


def on_dtensors(make: Make) -> Make:
    """With DTensors in a single process, which measures what they cost on the host."""
    return named(f"{make.__name__}, DTensors")(lambda params, **own: make(_sharded(params), **own))


def changing(make: Make, option: str, values: Iterable[Any], how: str) -> Make:
    """With another value of an option before every step."""

    @named(f"{make.__name__}, {how}")
    def made(params: Params, **options: Any) -> Any:
        optimizer, following = make(params, **options), itertools.cycle(values)
        step = optimizer.step

        def next_step() -> None:
            optimizer.param_groups[0][option] = next(following)
            step()

        optimizer.step = next_step
        return optimizer

    return made


def scheduled(make: Make) -> Make:
    """As most schedulers do it."""
    return changing(make, "lr", [1e-3 / number for number in range(1, 10_000)], "scheduled")


def cycling(make: Make) -> Make:
    """As OneCycleLR does it."""
    return changing(make, "betas", [(0.85 + 0.1 * abs(1 - k / 5000), 0.999) for k in range(10_000)], "betas cycle")


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
