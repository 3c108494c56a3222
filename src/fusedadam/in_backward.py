"""Stepping during backward: a parameter is updated as soon as its gradient is complete, which is then let go."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusedadam.optimizers.base import FusedOptimizer
from fusedadam.optimizers.distributed import are_flat
from fusedadam.tensors.shards import sharding_of

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    if not callable(make_optimizer):
        kind = type(make_optimizer).__name__
        raise TypeError(
            f"make_optimizer is a {kind}; it must be a function that makes the optimizer, such as lambda params: "
            "AdamW(params, lr=1e-3)"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "model is a DistributedDataParallel, which adds gradients up after they would have been used here; use "
            "optimizer.step() with it"
        )
    params = list(model.parameters())
    if are_flat(params):
        raise TypeError(
            "model has parameters that FullyShardedDataParallel has flattened, and whose gradients it adds up after "
            "they would have been used here; use optimizer.step() with it, or shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if any(map(is_lazy, params)):
        raise TypeError("model has lazy parameters, which its first forward pass makes; run one before, with any batch")
    optimizer = make_optimizer(params)
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"make_optimizer returned a {type(optimizer).__name__}; it must return an optimizer of fusedadam"
        )
    optimizer._in_backward = InBackward(optimizer)
    optimizer._in_backward.begin([param for param in optimizer._params() if param.requires_grad])
    return optimizer


class InBackward:
    """Steps of single parameters, on behalf of the optimizer that they belong to."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        self.alone: dict[Tensor, FusedOptimizer] = {}  # one for each parameter, with the options and state of all
        self._done: set[Tensor] = set()  # since the last call of optimizer.step()
        self._hooks: list[Any] = []
        self._check(optimizer)

    def begin(self, params: list[Tensor]) -> None:
        """Removes hooks that an earlier optimizer put on these parameters."""
        for hook in [h for param in params for h in (param._post_accumulate_grad_hooks or {}).values()]:
            if isinstance(other := getattr(hook, "__self__", None), InBackward):
                other.stop()
        self._hooks = [param.register_post_accumulate_grad_hook(self.step) for param in params]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._optimizer._in_backward = None

    @torch.no_grad()
    def step(self, param: Tensor) -> None:
        self._optimizer._check_may_step()
        if param in self._done:
            raise RuntimeError(
                "backward() was called again before optimizer.step(): gradients cannot be accumulated over several "
                "calls when each is used at once; call optimizer.step() after every backward(), or, after one that "
                "failed, optimizer.zero_grad()"
            )
        alone = self._of(param)
        self._check(alone)  # options may have changed
        self._optimizer._begin_copies()
        with torch._C.DisableTorchFunction():
            alone._step()
        self._done.add(param)
        param.grad = None

    def give_up(self) -> None:
        """An iteration is over, whether or not its backward pass came to an end."""
        self._done.clear()

    def end(self) -> None:
        """An iteration is over."""
        with torch._C.DisableTorchFunction():
            again = any(param.grad is not None for param in self._done)
        if again:
            raise RuntimeError(
                "a parameter that was updated in backward has a gradient again: from a second backward(), or put there "
                "later, as DistributedDataParallel does; call optimizer.zero_grad() to drop it, and step in backward "
                "only where there is one backward() for each step()"
            )
        self._done.clear()

    def _of(self, param: Tensor) -> FusedOptimizer:
        """With its group's own options and its own state, whatever they become."""
        whole, alone = self._optimizer, self.alone.get(param)
        groups = whole.param_groups
        if alone is not None:
            group = alone.param_groups[0].maps[1]  # type: ignore[attr-defined]
            if any(g is group for g in groups) and whole.state[param] is alone.state[param]:
                return alone
        group = next(g for g in groups if any(p is param for p in g["params"]))
        new: Any = object.__new__(type(whole))
        new.param_groups = [ChainMap({"params": [param]}, group)]
        new.state, new.defaults = {param: whole.state[param]}, whole.defaults
        new._forget()
        self.alone[param] = new
        return cast(FusedOptimizer, new)

    @staticmethod
    def _check(optimizer: FusedOptimizer) -> None:
        if optimizer.looks_at_several():
            raise ValueError(
                "stepping in backward sees one gradient at a time, and cannot clip by a norm over several; leave "
                "max_grad_norm out (BertAdam: use clip='parameter')"
            )
        if optimizer.sums() and any(sharding_of(param) is not None for param in optimizer._params()):
            raise ValueError(
                "stepping in backward would wait for the other processes at every parameter, since this optimizer sums "
                "over parameters that are divided among them; use optimizer.step()"
            )
