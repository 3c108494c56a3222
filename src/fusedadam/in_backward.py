"""Stepping during backward: each parameter is updated as soon as its gradient is complete, which is then freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusedadam.contract import nonfinite
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.declarations import Group
from fusedadam.contract.stepper import Stepper, Targets
from fusedadam.contract.wrappers import are_flat
from fusedadam.engine.launch import NO_AMP
from fusedadam.engine.plan import Plan
from fusedadam.tensors.shards import sharding_of

__all__ = ["step_in_backward"]

Optimizer = TypeVar("Optimizer", bound=FusedOptimizer)


def step_in_backward(model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """Makes an optimizer for the parameters of ``model`` that steps while ``backward()`` runs.

    Each parameter is updated when its gradient is complete, and the gradient is freed, so that the gradients are never
    in memory all at once. Results are the same as with ``step()``. The training loop stays as it is:
    ``optimizer.step()`` finds nothing left to update and marks the end of the iteration; schedulers and state dicts
    work as always.

    Refuses what needs all gradients at once: clipping by a norm over several parameters, gradients accumulated over
    several calls of ``backward()``, :class:`torch.amp.GradScaler` (use bfloat16), and
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
    optimizer._in_backward.register_hooks([param for param in optimizer._params() if param.requires_grad])
    return optimizer


class InBackward:
    """Steps of single parameters, under the options and with the states of the optimizer that they belong to."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        self.steppers: dict[Tensor, Stepper] = {}
        self._groups: dict[Tensor, Group] = {}
        self._updated: set[Tensor] = set()  # since the last call of optimizer.step()
        self._hooks: list[Any] = []
        self._check(optimizer._stepper, optimizer._targets())

    def register_hooks(self, params: list[Tensor]) -> None:
        """Also removes hooks that an earlier optimizer put on these parameters."""
        for hook in [h for param in params for h in (param._post_accumulate_grad_hooks or {}).values()]:
            if isinstance(other := getattr(hook, "__self__", None), InBackward):
                other.remove_hooks()
        self._hooks = [param.register_post_accumulate_grad_hook(self.step) for param in params]

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._optimizer._in_backward = None

    @torch.no_grad()
    def step(self, param: Tensor) -> None:
        optimizer = self._optimizer
        optimizer._check_may_step()
        if param in self._updated:
            raise RuntimeError(
                "backward() was called again before optimizer.step(): gradients cannot be accumulated over several "
                "calls when each is used at once; call optimizer.step() after every backward(), or, after one that "
                "failed, optimizer.zero_grad()"
            )
        targets = Targets([self._group_of(param)], [[param]], {param: optimizer.state[param]})
        stepper = self.steppers.get(param) or self.steppers.setdefault(param, Stepper(type(optimizer)))
        self._check(stepper, targets)  # options may have changed
        if optimizer.watch_norms and sharding_of(param) is not None:
            raise ValueError(
                "watch_norms=True would make stepping in backward wait for the other processes at every parameter that "
                "is sharded among them; set watch_norms=False, or use optimizer.step()"
            )
        optimizer._begin_copies()
        with torch._C.DisableTorchFunction():
            stepper.run(stepper.prepare(targets, NO_AMP, optimizer.watch_norms))
        self._updated.add(param)
        param.grad = None

    def end_iteration(self) -> None:
        with torch._C.DisableTorchFunction():
            again = any(param.grad is not None for param in self._updated)
        if again:
            raise RuntimeError(
                "a parameter that was updated in backward has a gradient again: from a second backward(), or put there "
                "later, as DistributedDataParallel does; call optimizer.zero_grad() to drop it, and step in backward "
                "only where there is one backward() for each step()"
            )
        self._updated.clear()

    def abandon_iteration(self) -> None:
        """Ends an iteration whose backward pass may have failed."""
        self._updated.clear()

    def reset(self) -> None:
        """Forgets earlier steps."""
        self.steppers.clear()

    def last_plans(self, params: list[Tensor]) -> dict[int, Plan]:
        """The last plan of each parameter that took part in a step, by its index in ``params``."""
        plans = {k: self.steppers[param].last_plan for k, param in enumerate(params) if param in self.steppers}
        return {k: plan for k, plan in plans.items() if plan is not None}

    def report(self, name: str, params: list[Tensor]) -> dict[int, float]:
        """A value of the last step for each parameter that took part, by its index in ``params``."""
        reports = {k: self.steppers[param].report(name) for k, param in enumerate(params) if param in self.steppers}
        return {k: report[0] for k, report in reports.items() if report}

    def _group_of(self, param: Tensor) -> Group:
        groups = self._optimizer.param_groups
        known = self._groups.get(param)
        if known is None or not any(group is known for group in groups):
            self._groups[param] = next(g for g in groups if any(p is param for p in g["params"]))
        return self._groups[param]

    @staticmethod
    def _check(stepper: Stepper, targets: Targets) -> None:
        if stepper.has_shared_sums(targets.groups):
            raise ValueError(
                "stepping in backward sees one gradient at a time, and cannot clip by a norm over several; leave "
                "max_grad_norm out (BertAdam: use clip='parameter')"
            )
        if nonfinite.is_asked_for(targets.groups):
            raise ValueError(
                "stepping in backward sees one gradient at a time, and could not skip a whole step; leave "
                "skip_nonfinite out"
            )
        if stepper.has_sums(targets.groups) and any(sharding_of(param) is not None for param in targets.params):
            raise ValueError(
                "stepping in backward would wait for the other processes at every parameter, since this optimizer sums "
                "over parameters that are sharded among them; use optimizer.step()"
            )
