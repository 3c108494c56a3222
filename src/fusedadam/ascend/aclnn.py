"""CANN's two-phase call of ApplyFusedEmaAdam: the first checks everything and prepares, the second runs.

    >>> grad, var, m, v, s = (torch.full((2,), value) for value in (1.0, 1.0, 0.0, 0.0, 1.0))
    >>> status, size, executor = aclnnApplyFusedEmaAdamGetWorkspaceSize(
    ...     grad, var, m, v, s, torch.tensor([1]), 0.5, 0.5, 0.9, 0.999, 1e-8, 1, True, 0.0)
    >>> aclnnApplyFusedEmaAdam(torch.empty(size, dtype=torch.uint8), size, executor, None)
    0
    >>> s
    tensor([0.7500, 0.7500])

Both give a status instead of raising. :func:`aclGetRecentErrMsg` has the reason in words of the last one, in this
thread, that was not 0.
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

_last = threading.local()


class Executor:
    """A step that is checked and has yet to run, once."""

    def __init__(self, update: Callable[[], Update]) -> None:
        self._update: Callable[[], Update] | None = update
        self.workspace_size = update().bytes_of_table()

    def run(self, workspace: Any, size: Any, stream: Any) -> None:
        if self._update is None:
            raise ValueError("executor has run already, and runs once; get another from the first phase")
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < self.workspace_size:
            raise ValueError(f"workspaceSize is {size!r}; it must be at least {self.workspace_size}")
        update = self._update()  # checks the tensors once more: they may have become others since
        memory = _memory(workspace, int(size), update) if self.workspace_size else None
        with _on(stream, update.device):
            update.run(memory)
        self._update = None


def _memory(workspace: Any, size: int, update: Update) -> Tensor:
    if not isinstance(workspace, Tensor) or workspace.layout != torch.strided or workspace.is_quantized:
        raise TypeError(f"workspace is a {type(workspace).__name__}; it must be a plain tensor of memory")
    if not workspace.is_contiguous():
        raise ValueError("workspace has gaps; it must be contiguous")
    if workspace.device != update.device:
        raise ValueError(f"workspace is on {workspace.device}; it must be on {update.device}, as varRef is")
    memory = workspace.detach().view(-1).view(torch.uint8)
    if memory.numel() < size:
        raise ValueError(f"workspace has {memory.numel()} bytes, but workspaceSize says {size}; they must be there")
    if memory.data_ptr() % 8:
        raise ValueError("workspace must begin at a multiple of 8 bytes")
    checks.no_shared_memory([("workspace", memory), *update.tensors])
    return memory


def aclnnApplyFusedEmaAdamGetWorkspaceSize(
    grad: Tensor | None, varRef: Tensor | None, mRef: Tensor | None, vRef: Tensor | None, sRef: Tensor | None,
    step: Tensor | None, lr: float, emaDecay: float, beta1: float, beta2: float, eps: float, mode: int,
    biasCorrection: bool, weightDecay: float,
) -> tuple[int, int, Executor | None]:  # fmt: skip
    """Checks everything; gives the status, the size of the workspace in bytes, and an executor that runs once."""
    tensors = {"grad": grad, "varRef": varRef, "mRef": mRef, "vRef": vRef, "sRef": sRef}
    for name, value in {**tensors, "step": step}.items():
        if value is None:
            return _failed(ACLNN_ERR_PARAM_NULLPTR, f"{name} is missing; it must be a tensor"), 0, None
    try:
        if not isinstance(step, Tensor):
            raise TypeError(f"step is a {type(step).__name__}; it must be an int64 tensor of one element")
        checks.ema_decay("emaDecay", emaDecay)
        checks.boolean("biasCorrection", biasCorrection)
        checks.number("weightDecay", weightDecay)
        options = (lr, emaDecay, beta1, beta2, eps, mode, biasCorrection, weightDecay)
        executor = Executor(lambda: ema_update(tensors, step, *options))
    except (TypeError, ValueError, RuntimeError) as error:
        return _failed(ACLNN_ERR_PARAM_INVALID, str(error)), 0, None
    return ACLNN_SUCCESS, executor.workspace_size, executor


def aclnnApplyFusedEmaAdam(workspace: Any, workspaceSize: int, executor: Executor | None, stream: Any) -> int:
    """Runs what the first phase has prepared; gives the status.

    Args:
        workspace: memory on the tensors' device, as a contiguous tensor of any dtype
        workspaceSize: how many bytes of it may be used, at least what the first phase said
        executor: what the first phase gave
        stream: the stream to run on, or None for the current one
    """
    if executor is None:
        return _failed(ACLNN_ERR_PARAM_NULLPTR, "executor is missing; it must be what the first phase gave")
    if not isinstance(executor, Executor):
        kind = type(executor).__name__
        return _failed(ACLNN_ERR_PARAM_INVALID, f"executor is a {kind}; it must be what the first phase gave")
    if workspace is None and executor.workspace_size:
        needed = f"a tensor of {executor.workspace_size} bytes"
        return _failed(ACLNN_ERR_PARAM_NULLPTR, f"workspace is missing; it must be {needed}")
    try:
        executor.run(workspace, workspaceSize, stream)
    except (TypeError, ValueError, RuntimeError) as error:
        return _failed(ACLNN_ERR_PARAM_INVALID, str(error))
    return ACLNN_SUCCESS


def aclGetRecentErrMsg() -> str | None:
    """Why the last call in this thread that failed did; None if none has. Asking takes it away."""
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
