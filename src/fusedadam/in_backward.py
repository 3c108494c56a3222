"""Stepping during backward: a parameter is updated as soon as its gradient is complete, which is then let go."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fusedadam.optimizer import FusedOptimizer

__all__ = ["step_in_backward"]

Optimizer = TypeVar("Optimizer", bound=FusedOptimizer)


def step_in_backward(model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """Makes an optimizer for the parameters of ``model`` that steps while ``backward()`` runs.

    Each parameter is updated when its gradient is complete, and the gradient freed: never are all gradients in memory
    at once. Results are those of ``step()``. The training loop stays as it is: ``optimizer.step()`` finds nothing left
    to update and marks the end of the iteration; schedulers and state dicts work as always.

    What needs all gradients at once cannot go with it, and is refused: clipping by a norm over several parameters,
    gradients accumulated over several calls of ``backward()``, :class:`torch.amp.GradScaler` (use bfloat16), and
    :class:`torch.nn.parallel.DistributedDataParallel`, which adds gradients up after they are complete here.

    Args:
        model: whose parameters are trained; those that do not require a gradient now are left to ``step()``
        make_optimizer: is called with the list of parameters, and returns one of the optimizers of this package

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = step_in_backward(model, lambda params: AdamW(params, lr=1e-3))
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> model.weight.grad is None
        True
        >>> optimizer.step()
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "model is a DistributedDataParallel, which adds gradients up after they would have been used here; use "
            "optimizer.step() with it"
        )
    params = list(model.parameters())
    optimizer = make_optimizer(params)
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"make_optimizer returned a {type(optimizer).__name__}; it must return an optimizer of fusedadam"
        )
    stepping = optimizer._in_backward = InBackward(optimizer)
    for param in params:
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(stepping.step)
    return optimizer


class InBackward:
    """Steps of single parameters, on behalf of the optimizer that they belong to."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        self.alone: dict[Tensor, FusedOptimizer] = {}  # one for each parameter, with the options and state of all
        self.done: set[Tensor] = set()  # since the last call of optimizer.step()
        if optimizer.looks_at_several():
            raise ValueError(
                "stepping in backward sees one gradient at a time, and cannot clip by a norm over several; leave "
                "max_grad_norm out (BertAdam: use clip='parameter')"
            )

    @torch.no_grad()
    def step(self, param: Tensor) -> None:
        self._optimizer._check_may_step()
        if param in self.done:
            raise RuntimeError(
                "backward() was called again before optimizer.step(): gradients cannot be accumulated over several "
                "calls when each is used at once; call optimizer.step() after every backward(), or do not step in it"
            )
        if param not in self.alone:
            self.alone[param] = self._make(param)
        with torch._C.DisableTorchFunction():
            self.alone[param]._step()
        self.done.add(param)
        param.grad = None

    def _make(self, param: Tensor) -> FusedOptimizer:
        whole = self._optimizer
        group = next(g for g in whole.param_groups if any(p is param for p in g["params"]))
        alone: Any = object.__new__(type(whole))
        alone.param_groups = [ChainMap({"params": [param]}, group)]  # its group's own options, whatever they become
        alone.state, alone.defaults = {param: whole.state[param]}, whole.defaults
        alone._forget()
        return cast(FusedOptimizer, alone)
