"""Kernels that are ready to be launched, and queues of them.

Everything is compiled when a plan is made, so that errors of the compiler come before anything is written, and a launch
need not look at its arguments again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedadam.backends.triton import direct, ops
from fusedadam.engine.backend import Action
from fusedadam.engine.launch_table import LaunchTable


class Ready:
    """A compiled kernel with its grid and its arguments. A call takes arguments that differ this time, by position."""

    def __init__(
        self, device: torch.device, function: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], warps: int
    ) -> None:
        self._grid, self._arguments, self._function = grid, arguments, function
        self.direct: direct.DirectKernel | None = None
        if grid[0] and not ops.INTERPRETED:
            with on(device):
                compiled = function.warmup(*arguments, grid=grid, num_warps=warps, enable_fp_fusion=False)
                self._launch = compiled[grid]
                self.direct = direct.kernel(device, compiled, grid, arguments)

    def __call__(self, changed: Mapping[int, Any] | None = None) -> None:
        if self.direct is not None and not direct.has_hooks():
            self.direct(changed)
            return
        if not self._grid[0]:
            return
        arguments = [a if changed is None else changed.get(k, a) for k, a in enumerate(self._arguments)]
        if ops.INTERPRETED:
            self._function[self._grid](*arguments)
        else:  # addresses instead of tensors: Triton would look each of them up and have the driver check it
            self._launch(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))

    @property
    def unscaled(self) -> Ready:
        return self


class StageKernel:
    """The kernel of a stage, and its twin for scaled gradients, which is compiled when there are some."""

    def __init__(self, table: LaunchTable, unscaled: Ready, make_scaled: Callable[[], Ready], scale_at: int) -> None:
        self._table, self.unscaled, self._make_scaled = table, unscaled, functools.cache(make_scaled)
        self._scale_at = scale_at  # the arguments there are the scale, and whether an infinity was found
        table.compile_scaled.append(self._make_scaled)

    def __call__(self) -> None:
        table = self._table
        if table.grad_scale is None and table.found_inf is None:
            self.unscaled()
        else:
            given = enumerate((table.grad_scale, table.found_inf), self._scale_at)
            self._make_scaled()({place: tensor for place, tensor in given if tensor is not None})


class Queue:
    """Kernels that are launched one after the other."""

    def __init__(self, device: torch.device, kernels: Sequence[Ready | StageKernel]) -> None:
        self.device, self.kernels = device, kernels

    def __call__(self, *_: object) -> None:
        with on(self.device):
            for kernel in self.kernels:
                kernel()


def joined(runs: Sequence[Callable[..., None]]) -> Action | None:
    """Several queues of a step without a GradScaler as one, if CUDA's driver can launch all of it."""
    queues = [run for run in runs if isinstance(run, Queue)]
    kernels = [kernel.unscaled.direct for queue in queues for kernel in queue.kernels]
    found = [kernel for kernel in kernels if kernel is not None]
    if len(queues) < len(runs) or len(found) < len(kernels) or len({queue.device for queue in queues}) != 1:
        return None
    device, launch = queues[0].device, direct.launcher(found)

    def run() -> None:
        if direct.has_hooks():
            for queue in queues:
                queue()
        else:
            with on(device):
                launch()

    return run


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, which need not be the tensors' own."""
    if device.type == "cpu" or (device.type == "cuda" and torch._C._cuda_getDevice() == device.index):
        return nullcontext()
    module = getattr(torch, device.type)
    if device.index == module.current_device():
        return nullcontext()
    guard: AbstractContextManager[Any] = module.device(device)
    return guard
