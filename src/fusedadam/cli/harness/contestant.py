"""One implementation of an optimizer that steps over a set of parameters, a large copy, and the bytes of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedadam.cli.harness.disturbance import MOST_WAITING
from fusedadam.cli.harness.shapes import Shape
from fusedadam.cli.harness.timing import Timer, large_copy, parameters_with_gradients, waiting_for
from fusedadam.contract.base import FusedOptimizer
from fusedadam.engine.participant import arrays_of
from fusedadam.formats import FORMATS, compute_dtype

Make = Callable[[list[torch.nn.Parameter]], Any]  # returns an object with step()


class First(NamedTuple):
    """What the first step shows."""

    ms: float  # with everything that it compiles
    bytes_moved: int | None  # that a step must move, if they are known
    state_bytes: int  # of the tensors that the optimizer has, wherever they are
    allocated: int | None = None  # on the device since the optimizer was made; None on a CPU


class Turn(NamedTuple):
    ms: float  # per step
    copied_per_ms: float | None  # bytes that a large copy moves; None if it had to wait for a core
    waited: float  # seconds that threads waited for a core during the steps, per second


class Contestant:
    """The commands that :func:`measure.measure` sends, in the order of the methods."""

    def __init__(self, make: Make, shapes: Sequence[Shape], dtype: str, device: str, seconds: float) -> None:
        """``seconds``: of a turn."""
        self.make, self.shapes, self.dtype, self.device, self.seconds = make, shapes, dtype, device, seconds

    def prepare(self) -> None:
        """Makes the optimizer, which imports its package."""
        self.params = parameters_with_gradients(self.shapes, self.device, getattr(torch, self.dtype))
        self.grads = [param.grad for param in self.params if param.grad is not None]  # all of them
        self.allocated = allocated(self.device)
        self.optimizer = self.make(self.params)

    def first_step(self) -> First:
        """Takes the first step, then some that warm up."""
        needs_backward, wait = getattr(self.optimizer, "needs_backward", False), waiting_for(self.device)
        if needs_backward:
            self.renew_gradients()
        wait()
        began = time.perf_counter()
        self.optimizer.step()
        wait()
        ms = 1e3 * (time.perf_counter() - began)
        takes_gradients = any(param.grad is None for param in self.params)
        self.before = self.renew_gradients if needs_backward or takes_gradients else None
        self.step = Timer(self.optimizer.step, self.device, self.seconds, self.before)
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad  # so that gradients take as much memory as before
        after = allocated(self.device)
        added = None if after is None or self.allocated is None else after - self.allocated
        copy, self.copied = large_copy(self.device)
        self.copy = Timer(copy, self.device, self.seconds / 4)
        ours = isinstance(self.optimizer, FusedOptimizer)
        moved = bytes_moved(self.optimizer) if ours else getattr(self.optimizer, "bytes_moved", None)
        if ours and any(group.get("offload") for group in self.optimizer.param_groups):
            moved = None  # most of it over the bus, which copies on the device say nothing about
        return First(ms, moved, state_bytes(self.optimizer, self.params), added)

    def turn(self) -> Turn:
        if self.before is not None:
            self.before()
        self.optimizer.step()  # refills the caches, which other contestants have used
        step, copy = self.step.turn(), self.copy.turn()
        copied = self.copied / copy.ms if copy.waited <= MOST_WAITING else None
        return Turn(step.ms, copied, step.waited)

    def renew_gradients(self) -> None:
        """By a backward pass: an optimizer may set gradients to None, or have hooks that take them."""
        for param in self.params:
            param.grad = None
        torch.autograd.backward(self.params, self.grads)


def allocated(device: str) -> int | None:
    """Bytes in use on a GPU, as torch's allocator counts them."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else None


def bytes_moved(optimizer: FusedOptimizer) -> int:
    """What a step must read and write by its rule: each element-wise stage moves its roles, in their formats."""
    moved = 0
    for group in optimizer.param_groups:
        flags = {flag: bool(optimizer.value(group, flag)) for flag in optimizer._flags}
        for param in group["params"]:
            formats = optimizer.storage_of(group, param).formats
            deferred = [role for role, fmt in formats.items() if FORMATS[fmt].is_deferred]
            tensors = {**optimizer.state[param], "param": param, "grad": param.grad}
            specialized = optimizer.rule.specialize(flags, param, deferred)
            if specialized.product is not None:  # its operand, and then its result
                tensors[specialized.product.name] = param.to("meta", compute_dtype(param.dtype))
            for stage in specialized.stages:
                for role in (*stage.reads, *stage.writes) if stage.space == "element" else ():
                    moved += sum(tensors[name].nbytes for name in arrays_of(role, formats.get(role)))
    return moved


def state_bytes(optimizer: Any, params: Iterable[Tensor]) -> int:
    """What an optimizer keeps beside parameters and gradients, in any of its objects."""
    known = {_storage(t) for p in params for t in (p, p.grad) if t is not None}
    kept = {_storage(t): t.untyped_storage().nbytes() for t in _tensors(vars(optimizer), set())}
    return sum(size for storage, size in kept.items() if storage not in known)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that can be reached; a tensor subclass that wraps others (quantised ones do) counts as those."""
    if id(value) in seen or isinstance(value, (str, int, float, type)) or value is None:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name), seen)
        else:
            yield value
        return
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Mapping):
        value = vars(value)
    if isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, seen)
