"""Peers for optimizers that torch does not have, written plainly with torch operations, as most people write them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedadam.schedules import warmup_linear
from fusedadam.tensors.matrices import matrices_of

EMA_DECAY = 0.9999


class Compiled:
    """torch's own optimizer with its step compiled by torch.compile."""

    def __init__(self, params: Iterable[nn.Parameter], name: str, **options: Any) -> None:
        self.optimizer = optimizer = getattr(torch.optim, name)(params, **options)
        self.step = torch.compile(lambda: optimizer.step(), fullgraph=False)


def deepspeed_adam(params: list[nn.Parameter], decoupled: bool, **options: Any) -> Any:
    adam = importlib.import_module("deepspeed.ops.adam")
    if params[0].device.type == "cpu":
        return adam.DeepSpeedCPUAdam(params, adamw_mode=decoupled, **options)
    return adam.FusedAdam(params, adam_w_mode=decoupled, **options)


def torchao_offload(params: Iterable[nn.Parameter], **options: Any) -> Any:
    """Its hooks copy gradients to the CPU in the backward pass; without one, its step does nothing."""
    optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer(params, **options)
    optimizer.needs_backward = True
    return optimizer


def schedule_free(params: Iterable[nn.Parameter], **options: Any) -> Any:
    """The authors'. It begins in eval mode."""
    optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(params, **options)
    optimizer.train()
    return optimizer


class Yardstick(torch.optim.AdamW):
    """torch's fused AdamW with its defaults, for optimizers that compute something else. It knows what it moves."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(params, fused=True, **options)

    @property
    def bytes_moved(self) -> int:
        """Parameter and both moments are read and written, the gradient is read."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        return sum(6 * p.nbytes + p.grad.nbytes for p in params)


class TorchAdamWWithEma(torch.optim.AdamW):
    """EmaAdamW with torch's own means: the fused AdamW, then an average by foreach operations."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self.params: list[Tensor] = [p.detach() for group in self.param_groups for p in group["params"]]
        self.ema_params = [p.clone() for p in self.params]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps += 1
        keep = min(EMA_DECAY, (1 + self.steps) / (10 + self.steps))  # the warm-up that EmaAdamW has by default
        torch._foreach_lerp_(self.ema_params, self.params, 1 - keep)

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        trained = [p.clone() for p in self.params]
        torch._foreach_copy_(self.params, self.ema_params)
        yield
        torch._foreach_copy_(self.params, trained)


class TorchMuonAndAdamW(torch.optim.Optimizer):
    """Muon with torch's own means: its Muon for matrices, and its fused AdamW for the rest, as ours does where
    ``use_muon`` is None. torch's takes two dimensions alone, so it gets convolutions and stacks as views. The groups
    are those of the two, for schedules."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float, use_muon: None = None
    ) -> None:
        self.params = list(params)
        super().__init__(self.params, {"lr": lr})
        others = [p for p in self.params if p.dim() < 2]
        wide = [p for p in self.params if p.dim() >= 2]
        self.views = [(p, [nn.Parameter(matrix) for matrix in _matrices(p.detach())]) for p in wide]
        matrices = [matrix for _, views in self.views for matrix in views]
        self.optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum))
        if others:
            adamw = torch.optim.AdamW(others, lr, (0.9, 0.95), 1e-7, weight_decay, fused=True)
            self.optimizers.append(adamw)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> None:  # type: ignore[override]
        for param, views in self.views:
            if param.grad is not None:
                for matrix, grad in zip(views, _matrices(param.grad), strict=True):
                    matrix.grad = grad
        for optimizer in self.optimizers:
            optimizer.step()


def _matrices(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,) if tensor.dim() == 2 else tensor.view(matrices_of(tensor.shape)).unbind()


class Loop(torch.optim.Optimizer):
    """Updates one parameter after the other with a dozen torch operations, like most optimizers outside torch."""

    options: dict[str, Any]

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(params, {**self.options, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
                    state["step"] += 1
                    self.update(param, param.grad, state, group)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class BertAdamLoop(Loop):
    """BertAdam as in NVIDIA's BERT training: each gradient is clipped in place by its own norm."""

    options = {"lr": 1e-3, "warmup": 0.0, "t_total": -1, "b1": 0.9, "b2": 0.999, "e": 1e-6}
    options |= {"weight_decay": 0.01, "max_grad_norm": 1.0}

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2, exp_avg, exp_avg_sq = group["b1"], group["b2"], state["exp_avg"], state["exp_avg_sq"]
        if group["max_grad_norm"] > 0:
            nn.utils.clip_grad_norm_(param, group["max_grad_norm"])
        exp_avg.mul_(b1).add_(grad, alpha=1 - b1)
        exp_avg_sq.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        update = exp_avg / (exp_avg_sq.sqrt() + group["e"])
        if group["weight_decay"] > 0:
            update += group["weight_decay"] * param
        lr = group["lr"]
        if group["t_total"] != -1:  # its first step is number 0
            lr *= warmup_linear((state["step"] - 1) / group["t_total"], group["warmup"])
        param.add_(-lr * update)


class LambLoop(Loop):
    """Lamb as most packages have it."""

    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), step = group["betas"], state["step"]
        exp_avg = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        update = (exp_avg / (1 - beta1**step)).div_(denominator).add_(param, alpha=group["weight_decay"])
        weight_norm, update_norm = param.norm(), update.norm()
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        param.sub_(update.mul_(group["lr"] * ratio))
