"""Kernels that are ready to be launched, and queues of them.

Everything is compiled when a plan is made, so that errors of the compiler come before anything is written, and a launch
need not look at its arguments again.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedadam import compat
from fusedadam.backends.triton import direct, identity, ops
from fusedadam.engine.backend import Joined
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.tensors.transfer import on


class Ready:
    """A compiled kernel with its grid and its arguments. A call takes arguments that differ this time, by position."""

    def __init__(
        self, device: torch.device, function: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], warps: int,
        **options: Any,
    ) -> None:  # fmt: skip
        self._grid, self._arguments, self._function = grid, arguments, function
        self.direct: direct.DirectKernel | None = None
        if grid[0] and not ops.INTERPRETED:
            identity.recall()
            with on(device):
                compiled = function.warmup(*arguments, grid=grid, num_warps=warps, enable_fp_fusion=False, **options)
                self._launch, self._taken = compiled[grid], compat.launch_arguments(compiled, function.arg_names)
                self.direct = direct.kernel(device, compiled, grid, arguments)

    def __call__(self, changed: Mapping[int, Any] = {}) -> None:
        if self.direct is not None and not direct.has_hooks():
            self.direct(changed)
            return
        if not self._grid[0]:
            return
        arguments = [changed.get(k, a) for k, a in enumerate(self._arguments)]
        if ops.INTERPRETED:
            self._function[self._grid](*arguments)
        else:  # addresses instead of tensors: Triton would look each of them up and have the driver check it
            taken = [arguments[k] for k in self._taken]
            self._launch(*(a.data_ptr() if isinstance(a, Tensor) else a for a in taken))


class AmpKernel:
    """A kernel, and its twin for steps with a GradScaler, which is compiled when there is one. ``amp_at``: which of the
    twin's arguments are the scale (``scale``), and whether an infinity was found (``inf``)."""

    def __init__(
        self, table: LaunchTable, unscaled: Ready, make_scaled: Callable[[], Ready], amp_at: Mapping[str, int]
    ) -> None:
        self._table, self.unscaled, self.scaled, self.amp_at = table, unscaled, functools.cache(make_scaled), amp_at
        table.compile_scaled.append(self.scaled)

    def __call__(self) -> None:
        given = {"scale": self._table.grad_scale, "inf": self._table.found_inf}
        if given["scale"] is None and given["inf"] is None:
            self.unscaled()
        else:
            self.scaled()({place: given[name] for name, place in self.amp_at.items() if given[name] is not None})


class Queue:
    """Kernels that are launched one after the other."""

    def __init__(self, device: torch.device, kernels: Sequence[Ready | AmpKernel]) -> None:
        self.device, self.kernels = device, kernels

    def __call__(self, _: Any = None, /) -> None:
        with on(self.device):
            for kernel in self.kernels:
                kernel()

    def parts(self, is_scaled: bool) -> Iterator[tuple[Ready, Mapping[str, int]]]:
        """The kernels, and which of their arguments differ from step to step, by name."""
        for kernel in self.kernels:
            if isinstance(kernel, Ready):
                yield kernel, {}
            elif is_scaled:
                yield kernel.scaled(), kernel.amp_at
            else:
                yield kernel.unscaled, {}


class Scalars(Queue):
    """The kernel that evaluates scalars. ``step_at``: which argument is the number of the step, if the host counts;
    ``passed_at``: which are hyper-parameters."""

    def __init__(self, device: torch.device, kernel: Ready, step_at: int | None, passed_at: Sequence[int] = ()) -> None:
        super().__init__(device, [kernel])
        self._kernel, self._step_at = kernel, step_at
        self._passed_at = {f"{id(self)} {at}": at for at in passed_at}
        self.passed = dict.fromkeys(self._passed_at, 0)  # the bits of each, by a name that no other kernel has
        self._bits = struct.Struct(f"{len(passed_at)}q")

    def set_passed(self, numbers: Sequence[float], /) -> None:
        bits = self._bits.unpack(struct.pack(f"{len(numbers)}d", *numbers))
        self.passed = dict(zip(self._passed_at, bits, strict=True))

    def __call__(self, step: Any = 0, /) -> None:
        changed = {} if self._step_at is None else {self._step_at: step}
        changed |= {at: self.passed[name] for name, at in self._passed_at.items()}
        with on(self.device):
            self._kernel(changed)

    def parts(self, is_scaled: bool) -> Iterator[tuple[Ready, Mapping[str, int]]]:
        yield self._kernel, {**({} if self._step_at is None else {"step": self._step_at}), **self._passed_at}


def joined(runs: Sequence[Callable[..., None]], is_scaled: bool) -> Joined | None:
    """Several queues of a step as one, if CUDA's driver can launch all of it."""
    queues = [run for run in runs if isinstance(run, Queue)]
    parts = [part for queue in queues for part in queue.parts(is_scaled)]
    kernels = [ready.direct for ready, _ in parts]
    found = [kernel for kernel in kernels if kernel is not None]
    if not found or len(queues) < len(runs) or len(found) < len(kernels) or len({q.device for q in queues}) != 1:
        return None
    varying = [direct.Varying(k, at, name) for k, (_, places) in enumerate(parts) for name, at in places.items()]
    launch, device = direct.DirectQueue(found, varying), queues[0].device
    evaluating = [queue for queue in queues if isinstance(queue, Scalars) and queue.passed]
    neither = {"scale": torch.ones(1, device=device), "inf": torch.zeros(1, device=device)} if is_scaled else {}

    def run(step: int = 0, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        if direct.has_hooks():
            for queue in queues:
                queue(step)
            return
        values = {"step": step}
        for queue in evaluating:
            values |= queue.passed
        if is_scaled:
            values["scale"] = (neither["scale"] if grad_scale is None else grad_scale).data_ptr()
            values["inf"] = (neither["inf"] if found_inf is None else found_inf).data_ptr()
        with on(device):
            launch(values)

    return run
