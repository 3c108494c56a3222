"""Gradients under a GradScaler. A step divides them by the scale and leaves them so, as torch's fused optimizers do:
training loops accumulate over several steps, or log gradients, and count on it.

The kernels do the work: the last visit that reads a gradient stores it (``Stage.unscales``). Here is what else it
takes: a gradient that is written must have memory of its own, and autograd must know that it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch import Amp
from fusedadam.engine.snapshot import Tensors
from fusedadam.tensors.layout import extent
from fusedadam.tensors.shards import local


class Unscaling:
    """``slots``: where the snapshot has gradients; ``redistributed``: the slots of those that are sharded differently
    from their parameters, so that kernels see a copy."""

    def __init__(self, slots: Sequence[int], redistributed: Sequence[int]) -> None:
        self._slots, self._redistributed = np.array(slots, dtype=np.int64), redistributed
        self._extents: Int64s | None = None  # bytes, which stay the same as long as layouts do
        self._checked: Int64s | None = None  # the addresses of the last check

    def check(self, tensors: Tensors, addresses: Int64s) -> None:
        """Refuses gradients that cannot be written; looks at them again only if they have moved. ``addresses``: those
        of all slots."""
        begins = addresses[self._slots]
        if self._checked is not None and np.array_equal(begins, self._checked):
            return
        grads = [local(tensors[slot]) for slot in self._slots.tolist()]
        if self._extents is None:
            checks.unscalable(grads)
            self._extents = np.array([extent(grad) for grad in grads], dtype=np.int64)
        elif _may_overlap(begins, self._extents):
            checks.no_shared_gradients(grads)
        self._checked = begins

    def finish(self, tensors: Tensors, amp: Amp) -> None:
        """What is left to do after the kernels."""
        for slot in self._redistributed:
            _divide(local(tensors[slot]), amp)
        torch.autograd.graph.increment_version([tensors[slot] for slot in self._slots.tolist()])


def _may_overlap(begins: Int64s, extents: Int64s) -> bool:
    order = np.argsort(begins)
    ends = np.maximum.accumulate((begins + extents)[order])
    return bool((ends[:-1] > begins[order][1:]).any())


def _divide(grad: Tensor, amp: Amp) -> None:
    scale, found_inf = amp.on(grad.device)
    assert scale is not None
    unscaled = (grad.to(torch.promote_types(grad.dtype, torch.float32)) / scale).to(grad.dtype)
    grad.copy_(unscaled if found_inf is None else torch.where(found_inf == 0, unscaled, grad))
