"""Stepping during backward: each parameter is updated as soon as its gradient is complete, which is then freed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.declarations import Group
from fusedadam.contract.stepper import Stepper, Targets
from fusedadam.contract.wrappers import are_flat
from fusedadam.engine.launch import NO_AMP
from fusedadam.engine.plan import Plan
from fusedadam.engine.scalars import Options
from fusedadam.tensors.shards import sharding_of
from fusedadam.tensors.side_stream import SideStream
from fusedadam.tensors.transfer import capturing

__all__ = ["step_in_backward"]

Optimizer = TypeVar("Optimizer", bound=FusedOptimizer)


def step_in_backward(model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> Optimizer:
    """Makes an optimizer for the parameters of ``model`` that steps while ``backward()`` runs.

    Each parameter is updated when its gradient is complete, and the gradient is freed, so that the gradients are never
    in memory all at once. Results are the same as with ``step()``. The training loop stays as it is:
    ``optimizer.step()`` finds nothing left to update and marks the end of the iteration; schedulers and state dicts
    work as always.

    Keep the optimizer: once it is deleted, or after ``optimizer.stop_in_backward()``, gradients accumulate as usual. A
    copy of it (``copy.deepcopy``, ``pickle``) steps in backward too; copy it together with its model:
    ``copy.deepcopy((model, optimizer))``.

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
    _check(optimizer._stepper, optimizer._targets(), optimizer._options())
    InBackward(optimizer._params()).begin(optimizer)
    return optimizer


class Hook:
    """Called by autograd. It refers weakly to the optimizer, because Python's garbage collector does not see into hooks
    of tensors: model and optimizer would keep each other alive forever."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self.optimizer = weakref.ref(optimizer)

    def __call__(self, param: Tensor) -> None:
        optimizer = self.optimizer()
        if optimizer is not None and optimizer._in_backward is not None:
            optimizer._in_backward.step(optimizer, param)


class InBackward:
    """Steps of single parameters, under the options and with the states of the optimizer that it belongs to.

    ``params``: those that are stepped in backward, if they require a gradient.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.steppers: dict[Tensor, Stepper] = {}
        self._places: dict[Tensor, tuple[int, int]] = {}  # the group of each parameter, and where it is there
        self._updated: set[Tensor] = set()  # since the last call of optimizer.step()
        self._params = [param for param in params if param.requires_grad]
        self._remove_hooks: Callable[[], Any] | None = None
        self._side = SideStream()  # for parameters whose states are in host memory

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have parameters of their own, without hooks; the optimizer's copy calls :meth:`begin`."""
        return InBackward, (self._params,)

    def begin(self, optimizer: FusedOptimizer) -> None:
        """Puts hooks on the parameters, and removes those of an earlier optimizer."""
        if self._remove_hooks is not None:  # of the original of a shallow copy, whose parameters are the same
            optimizer._in_backward = None
            return
        for hook in [h for param in self._params for h in (param._post_accumulate_grad_hooks or {}).values()]:
            if isinstance(hook, Hook) and (earlier := hook.optimizer()) is not None:
                earlier.stop_in_backward()
        handles: list[RemovableHandle] = []
        self._remove_hooks = weakref.finalize(optimizer, _finish, handles, self._side)
        optimizer._in_backward, hook = self, Hook(optimizer)
        for param in self._params:
            handles.append(param.register_post_accumulate_grad_hook(hook))

    def end(self) -> None:
        if self._remove_hooks is not None:
            self._remove_hooks()

    @torch.no_grad()
    def step(self, optimizer: FusedOptimizer, param: Tensor) -> None:
        group = self._group_of(optimizer, param)
        if group is None:
            return
        optimizer._check_may_step()
        if param in self._updated:
            raise RuntimeError(
                "a parameter has a second gradient before optimizer.step(), and the first has been used: backward() "
                "was called again, or torch.utils.checkpoint with use_reentrant=True called it for each use of a "
                "shared block; call optimizer.step() after every backward(), or, after one that failed, "
                "optimizer.zero_grad(); checkpoint with use_reentrant=False"
            )
        targets = Targets([group], [[param]], {param: optimizer.state[param]})
        copies = optimizer._copies
        stepper = self.steppers.get(param) or self.steppers.setdefault(
            param, Stepper(type(optimizer), copies, host=optimizer._stepper.host)
        )
        options = stepper.read(targets.groups)
        _check(stepper, targets, options)  # which may have changed
        if optimizer.watch_norms and sharding_of(param) is not None:
            raise ValueError(
                "watch_norms=True would make stepping in backward wait for the other processes at every parameter that "
                "is sharded among them; set watch_norms=False, or use optimizer.step()"
            )
        with torch._C.DisableTorchFunction():
            prepared = stepper.prepare(targets, options, NO_AMP, optimizer.watch_norms)
            is_beside = prepared.plan.slabs and param.is_cuda and not capturing()
            with self._side.beside(param.grad) if is_beside else contextlib.nullcontext():  # type: ignore[arg-type]
                stepper.run(prepared)
        copies.params.pop(param, None)  # no step in backward is skipped
        self._updated.add(param)
        param.grad = None

    def end_iteration(self) -> None:
        self._side.join()
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
        self._side.join()
        self._updated.clear()

    def reset(self) -> None:
        """Forgets earlier steps."""
        self.steppers.clear()

    def last_plans(self, params: list[Tensor]) -> list[tuple[Plan, list[int]]]:
        """The last plan of each parameter that took part in a step, with its index in ``params``."""
        plans = [(self.steppers[param].last_plan, [k]) for k, param in enumerate(params) if param in self.steppers]
        return [(plan, index) for plan, index in plans if plan is not None]

    def _group_of(self, optimizer: FusedOptimizer, param: Tensor) -> Group | None:
        """The group that has it now; None if it was taken out. Most often it is where it was."""
        groups = optimizer.param_groups
        k, at = self._places.get(param, (0, 0))
        if not (k < len(groups) and at < len(groups[k]["params"]) and groups[k]["params"][at] is param):
            places = [(k, at) for k, g in enumerate(groups) for at, p in enumerate(g["params"]) if p is param]
            if not places:
                return None
            k, at = self._places[param] = places[0]
        return groups[k]


def _check(stepper: Stepper, targets: Targets, options: Options) -> None:
    if stepper.has_shared_sums(targets.groups):
        raise ValueError(
            "stepping in backward sees one gradient at a time, and cannot clip by a norm over several; leave "
            "max_grad_norm out (BertAdam: use clip='parameter')"
        )
    if options.skips_nonfinite:
        raise ValueError(
            "stepping in backward sees one gradient at a time, and could not skip a whole step; leave "
            "skip_nonfinite out"
        )
    if stepper.has_products(targets.groups):
        raise ValueError(
            "stepping in backward takes one parameter at a time, and each would keep memory for its own products of "
            "matrices; use optimizer.step(), or use_muon=False in every group"
        )
    if stepper.has_sums(targets.groups) and any(sharding_of(param) is not None for param in targets.params):
        raise ValueError(
            "stepping in backward would wait for the other processes at every parameter, since this optimizer sums "
            "over parameters that are sharded among them; use optimizer.step()"
        )


def _finish(handles: list[RemovableHandle], side: SideStream) -> None:
    """When an optimizer ends: a backward pass that has failed may have left steps on their way, and what they use must
    not be freed before they are done."""
    for handle in handles:
        handle.remove()
    side.join()
