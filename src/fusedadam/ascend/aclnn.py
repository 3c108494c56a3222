"""CANN's two-phase call of ApplyFusedEmaAdam: the first phase checks everything, the second runs.

    >>> grad, var, m, v, s = (torch.full((2,), value) for value in (1.0, 1.0, 0.0, 0.0, 1.0))
    >>> status, size, executor = aclnnApplyFusedEmaAdamGetWorkspaceSize(
    ...     grad, var, m, v, s, torch.tensor([1]), 0.5, 0.5, 0.9, 0.999, 1e-8, 1, True, 0.0)
    >>> aclnnApplyFusedEmaAdam(torch.empty(size, dtype=torch.uint8), size, executor, None)
    0
    >>> s
    tensor([0.7500, 0.7500])

Both return a status instead of raising. If it is not 0, :func:`aclGetRecentErrMsg` returns the reason in words, for
each thread its own.

The workspace is checked as CANN checks it, and not used: its size is what the addresses and scalars of one launch need,
which fusedadam keeps in memory of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.ascend.operators import ema_update
from fusedadam.functional import Update
from fusedadam.optimizers.ema_adamw import ema_adam

__all__ = [
    "ACLNN_ERR_PARAM_INVALID",
    "ACLNN_ERR_PARAM_NULLPTR",
    "ACLNN_SUCCESS",
    "aclGetRecentErrMsg",
    "aclnnApplyFusedEmaAdam",
    "aclnnApplyFusedEmaAdamGetWorkspaceSize",
]

ACLNN_SUCCESS = 0
ACLNN_ERR_PARAM_NULLPTR = 161001
ACLNN_ERR_PARAM_INVALID = 161002
WORKSPACE_SIZE = 8 * len((*ema_adam.roles, *ema_adam.scalar_names))  # bytes; each an address or a float64

_last = threading.local()


class Executor:
    """A step that is checked, and that can run once."""

    def __init__(self, update: Callable[[], Update]) -> None:
        update().give_back()  # checks everything
        self._update: Callable[[], Update] | None = update

    def run(self, workspace: Any, size: Any, stream: Any) -> None:
        if self._update is None:
            raise ValueError("executor has run already, and runs once; get another from the first phase")
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < WORKSPACE_SIZE:
            raise ValueError(f"workspaceSize is {size!r}; it must be at least {WORKSPACE_SIZE}")
        update = self._update()  # checks the tensors again: they may have changed since
        _check_workspace(workspace, int(size), update)
        with _on(stream, update.device):
            update.run()
        self._update = None


def _check_workspace(workspace: Any, size: int, update: Update) -> None:
    if not isinstance(workspace, Tensor) or workspace.layout != torch.strided or workspace.is_quantized:
        raise TypeError(f"workspace is a {type(workspace).__name__}; it must be a plain tensor of memory")
    if not workspace.is_contiguous():
        raise ValueError("workspace has gaps; it must be contiguous")
    if workspace.device != update.device:
        raise ValueError(f"workspace is on {workspace.device}; it must be on {update.device}, as varRef is")
    memory = workspace.detach().view(-1).view(torch.uint8)
    if memory.numel() < size:
        raise ValueError(f"workspace has {memory.numel()} bytes, but workspaceSize is {size}; make it that large")
    if memory.data_ptr() % 8:
        raise ValueError("workspace must begin at a multiple of 8 bytes")
    checks.no_shared_memory([("workspace", memory), *update.tensors])


def aclnnApplyFusedEmaAdamGetWorkspaceSize(
    grad: Tensor | None, varRef: Tensor | None, mRef: Tensor | None, vRef: Tensor | None, sRef: Tensor | None,
    step: Tensor | None, lr: float, emaDecay: float, beta1: float, beta2: float, eps: float, mode: int,
    biasCorrection: bool, weightDecay: float,
) -> tuple[int, int, Executor | None]:  # fmt: skip
    """Checks everything; returns the status, the size of the workspace in bytes, and an executor that runs once."""
    tensors = {"grad": grad, "varRef": varRef, "mRef": mRef, "vRef": vRef, "sRef": sRef}
    for name, value in {**tensors, "step": step}.items():
        if value is None:
            return _failed(ACLNN_ERR_PARAM_NULLPTR, f"{name} is missing; it must be a tensor"), 0, None
    try:
        if not isinstance(step, Tensor):
            raise TypeError(f"step is a {type(step).__name__}; it must be an int64 tensor of one element")
        checks.fraction("emaDecay", emaDecay)
        checks.boolean("biasCorrection", biasCorrection)
        checks.number("weightDecay", weightDecay)
        options = (lr, emaDecay, beta1, beta2, eps, mode, biasCorrection, weightDecay)
        executor = Executor(lambda: ema_update(tensors, step, *options))
    except (TypeError, ValueError, RuntimeError) as error:
        return _failed(ACLNN_ERR_PARAM_INVALID, str(error)), 0, None
    return ACLNN_SUCCESS, WORKSPACE_SIZE, executor


def aclnnApplyFusedEmaAdam(workspace: Any, workspaceSize: int, executor: Executor | None, stream: Any) -> int:
    """Takes the step that the first phase has checked; returns the status.

    Args:
        workspace: memory on the tensors' device, as a contiguous tensor of any dtype; it is checked, and not written
        workspaceSize: how many bytes it has, at least the size that the first phase returned
        executor: the one that the first phase returned
        stream: the stream to run on, or None for the current one
    """
    if executor is None:
        return _failed(ACLNN_ERR_PARAM_NULLPTR, "executor is missing; pass the one that the first phase returned")
    if not isinstance(executor, Executor):
        kind = type(executor).__name__
        return _failed(ACLNN_ERR_PARAM_INVALID, f"executor is a {kind}; pass the one that the first phase returned")
    if workspace is None:
        return _failed(ACLNN_ERR_PARAM_NULLPTR, f"workspace is missing; it must be a tensor of {WORKSPACE_SIZE} bytes")
    try:
        executor.run(workspace, workspaceSize, stream)
    except (TypeError, ValueError, RuntimeError) as error:
        return _failed(ACLNN_ERR_PARAM_INVALID, str(error))
    return ACLNN_SUCCESS


def aclGetRecentErrMsg() -> str | None:
    """Why the last call that failed in this thread did so, and None if none did. A reason is returned once."""
    reason = getattr(_last, "reason", None)
    _last.reason = None
    return reason


def _failed(status: int, reason: str) -> int:
    _last.reason = reason
    return status


def _on(stream: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if stream is None or device.type == "cpu":
        return contextlib.nullcontext()
    if getattr(stream, "device", None) != device:
        raise TypeError(f"stream is a {type(stream).__name__}; it must be a stream of {device}, or None")
    on: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).stream(stream)
    return on
