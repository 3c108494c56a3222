"""CANN's two-phase calls of ApplyFusedEmaAdam and ApplyAdamWV2: the first phase checks everything, the second runs.

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
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.ascend.operators import adamw_v2_update, ema_update
from fusedadam.formats import names
from fusedadam.functional import Update
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.ema_adamw import ema_adam
from fusedadam.rules.rule import Rule

__all__ = [
    "ACLNN_ERR_PARAM_INVALID",
    "ACLNN_ERR_PARAM_NULLPTR",
    "ACLNN_SUCCESS",
    "aclGetRecentErrMsg",
    "aclnnApplyAdamWV2",
    "aclnnApplyAdamWV2GetWorkspaceSize",
    "aclnnApplyFusedEmaAdam",
    "aclnnApplyFusedEmaAdamGetWorkspaceSize",
]

ACLNN_SUCCESS = 0
ACLNN_ERR_PARAM_NULLPTR = 161001
ACLNN_ERR_PARAM_INVALID = 161002
ADAMW_V2 = (
    "varRef", "grad", "mRef", "vRef", "maxGradNormOptionalRef", "step", "lr", "beta1", "beta2", "weightDecay", "eps"
)  # fmt: skip

Phase: TypeAlias = "tuple[int, int, Executor | None]"  # status, size of the workspace in bytes, executor

_last = threading.local()


class Executor:
    """A step that is checked, and that can run once."""

    def __init__(self, rule: Rule, update: Callable[[], Update]) -> None:
        update().give_back()  # checks everything
        self._update: Callable[[], Update] | None = update
        self.size = 8 * len((*rule.roles, *rule.scalar_names))  # bytes; each an address or a float64

    def run(self, workspace: Any, size: Any, stream: Any) -> None:
        if self._update is None:
            raise ValueError("executor has run already, and runs once; get another from the first phase")
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < self.size:
            raise ValueError(f"workspaceSize is {size!r}; it must be at least {self.size}")
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
) -> Phase:  # fmt: skip
    """Checks everything; returns the status, the size of the workspace in bytes, and an executor that runs once."""
    tensors = {"grad": grad, "varRef": varRef, "mRef": mRef, "vRef": vRef, "sRef": sRef}

    def prepare() -> Executor:
        if not isinstance(step, Tensor):
            raise TypeError(f"step is a {type(step).__name__}; it must be an int64 tensor of one element")
        checks.fraction("emaDecay", emaDecay)
        checks.boolean("biasCorrection", biasCorrection)
        checks.number("weightDecay", weightDecay)
        options = (lr, emaDecay, beta1, beta2, eps, mode, biasCorrection, weightDecay)
        return Executor(ema_adam, lambda: ema_update(tensors, step, *options))

    return _first_phase({**tensors, "step": step}, prepare)


def aclnnApplyFusedEmaAdam(workspace: Any, workspaceSize: int, executor: Executor | None, stream: Any) -> int:
    """Takes the step that the first phase has checked; returns the status.

    Args:
        workspace: memory on the tensors' device, as a contiguous tensor of any dtype; it is checked, and not written
        workspaceSize: how many bytes it has, at least the size that the first phase returned
        executor: the one that the first phase returned
        stream: the stream to run on, or None for the current one
    """
    return _second_phase(workspace, workspaceSize, executor, stream)


def aclnnApplyAdamWV2GetWorkspaceSize(
    varRef: Tensor | None, mRef: Tensor | None, vRef: Tensor | None, maxGradNormOptionalRef: Tensor | None,
    grad: Tensor | None, step: Tensor | None, lr: float, beta1: float, beta2: float, weightDecay: float, eps: float,
    amsgrad: bool, maximize: bool,
) -> Phase:  # fmt: skip
    """As :func:`aclnnApplyFusedEmaAdamGetWorkspaceSize`, for the step of ``npu_apply_fused_adamw_v2``.

    ``step`` is an int64 or float32 tensor with the number of steps *before* this one, 0 in the first: the kernel adds 1
    itself. It is not written. ``maxGradNormOptionalRef`` is needed with ``amsgrad``.
    """
    required = {"varRef": varRef, "mRef": mRef, "vRef": vRef, "grad": grad, "step": step}
    if amsgrad is True:
        required["maxGradNormOptionalRef"] = maxGradNormOptionalRef
    tensors, attributes = (varRef, grad, mRef, vRef, maxGradNormOptionalRef), (lr, beta1, beta2, weightDecay, eps)

    def update() -> Update:
        return adamw_v2_update(ADAMW_V2, *tensors, _one_more(step), *attributes, amsgrad, maximize)

    return _first_phase(required, lambda: Executor(adam, update))


def aclnnApplyAdamWV2(workspace: Any, workspaceSize: int, executor: Executor | None, stream: Any) -> int:
    """Takes the step that the first phase has checked; returns the status. Arguments as for
    :func:`aclnnApplyFusedEmaAdam`."""
    return _second_phase(workspace, workspaceSize, executor, stream)


def _one_more(step: Any) -> int:
    """The number of the step after so many."""
    if not isinstance(step, Tensor):
        raise TypeError(f"step is a {type(step).__name__}; it must be an int64 or float32 tensor of one element")
    if step.numel() != 1 or step.dtype not in (torch.int64, torch.float32):
        raise TypeError(
            f"step is a tensor of shape {tuple(step.shape)} and {names([step.dtype])}; it must be int64 or float32, of "
            "one element"
        )
    done = checks.number("step", step)
    if done != int(done):
        raise ValueError(f"step={done} is not a whole number; it must be the number of steps before this one")
    return int(step.item()) + 1


def _first_phase(required: Mapping[str, Any], prepare: Callable[[], Executor]) -> Phase:
    for name, value in required.items():
        if value is None:
            return _failed(ACLNN_ERR_PARAM_NULLPTR, f"{name} is missing; it must be a tensor"), 0, None
    try:
        executor = prepare()
    except (TypeError, ValueError, RuntimeError) as error:
        return _failed(ACLNN_ERR_PARAM_INVALID, str(error)), 0, None
    return ACLNN_SUCCESS, executor.size, executor


def _second_phase(workspace: Any, size: Any, executor: Any, stream: Any) -> int:
    if executor is None:
        return _failed(ACLNN_ERR_PARAM_NULLPTR, "executor is missing; pass the one that the first phase returned")
    if not isinstance(executor, Executor):
        kind = type(executor).__name__
        return _failed(ACLNN_ERR_PARAM_INVALID, f"executor is a {kind}; pass the one that the first phase returned")
    if workspace is None:
        return _failed(ACLNN_ERR_PARAM_NULLPTR, f"workspace is missing; it must be a tensor of {executor.size} bytes")
    try:
        executor.run(workspace, size, stream)
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
