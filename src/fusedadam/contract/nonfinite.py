"""Steps that are left out because a gradient is not finite (``skip_nonfinite=True``).

The device decides, as with a GradScaler: kernels write nothing if ``found_inf`` says so, and the host does not wait to
learn it. Processes that share parameters decide together (``wrappers.found_anywhere``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedadam.contract.wrappers import are_flat
from fusedadam.formats import FORMAT_OF_DTYPE
from fusedadam.tensors.complex_numbers import parts_in_memory
from fusedadam.tensors.shards import local


def check(params: Sequence[Tensor], is_under_zero: bool) -> None:
    """Refuses where a process sees only some of the gradients, and the others would go on."""
    if is_under_zero or are_flat(params):
        who = "ZeroRedundancyOptimizer" if is_under_zero else "FullyShardedDataParallel"
        raise ValueError(
            f"skip_nonfinite=True, but {who} gives each process only some of the gradients, so that some processes "
            "would skip a step and others take it; leave it out, or shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def found(params: Sequence[Tensor], before: Tensor | None = None) -> Tensor:
    """1 if a gradient of this process has an infinity or a NaN, else 0: on the device of the first one.

    ``before``: what a GradScaler has found.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        grad = None if param.grad is None else local(param.grad)
        # others are refused by name later
        if grad is not None and grad.numel() and grad.layout == torch.strided:
            if grad.is_complex():
                grad = parts_in_memory(grad)
            if grad.dtype not in FORMAT_OF_DTYPE:
                continue
            alike.setdefault((grad.device, grad.dtype), []).append(grad)
    answer = torch.zeros((), device=next(iter(alike), (local(params[0]).device,))[0])
    for grads in alike.values():
        largest = torch.stack(torch._foreach_norm(grads, math.inf))  # NaN if any element is
        bad = largest.isfinite().all().logical_not().float()
        answer = torch.maximum(answer, bad.to(answer.device, non_blocking=answer.is_cuda))
    if before is not None:
        answer = torch.maximum(answer, before.reshape(()).to(answer.device, answer.dtype, non_blocking=answer.is_cuda))
    return answer
