"""Gradients under a GradScaler. A step divides them by the scale and leaves them so, as torch's fused optimizers do:
training loops accumulate over several steps, or log gradients, and count on it.

The kernels do the work: the last visit that reads a gradient stores it (``Stage.unscales``). Here is what else it
takes: a gradient that is written must have memory of its own, and autograd must know that it was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fusedadam import checks
from fusedadam.engine.changes.snapshot import Tensors
from fusedadam.engine.geometry import Int64s
from fusedadam.engine.launch import Amp
from fusedadam.tensors.complex_numbers import parts_in_memory
from fusedadam.tensors.layout import extent
from fusedadam.tensors.shards import local


class Unscaling:
    """``names``: what is in the slots of a snapshot that a step reads or writes, ``"grad"`` among them. ``apart``: the
    slots of gradients that kernels cannot store unscaled: they see a copy of those that are sharded differently from
    their parameters, or lazily conjugated, and compute with fewer bits than float64 gradients of other parameters
    have."""

    def __init__(self, names: Mapping[int, str], apart: Sequence[int]) -> None:
        self._names, self._apart = names, apart
        self._grads = np.array([slot for slot, name in names.items() if name == "grad"], dtype=np.int64)
        self._others = np.array([slot for slot, name in names.items() if name != "grad"], dtype=np.int64)
        self._extents: Int64s | None = None  # bytes of each slot, which stay the same as long as layouts do
        self._checked: tuple[Int64s, Int64s] | None = None  # the addresses of gradients and others at the last check
        self._others_in_order: tuple[Int64s, Int64s] = _in_order(self._others[:0], self._others[:0])
        self._in_order_at: Int64s | None = None  # the addresses of others that these are for
        self._may_lie_so: Int64s | None = None  # distances of gradients that were compared one by one

    def check(self, tensors: Tensors, addresses: Int64s) -> None:
        """Refuses gradients that cannot be written; looks at them again only if something has moved. ``addresses``:
        those of all slots."""
        grads, others = addresses[self._grads], addresses[self._others]
        known = self._checked
        if known is not None and np.array_equal(grads, known[0]) and np.array_equal(others, known[1]):
            return
        if self._extents is None:
            checks.unscalable([local(tensors[slot]) for slot in self._grads.tolist()])
            self._extents = np.zeros(len(addresses), dtype=np.int64)
            self._extents[[*self._names]] = [extent(local(tensors[slot])) for slot in self._names]
        if self._in_order_at is None or not np.array_equal(others, self._in_order_at):
            self._others_in_order = _in_order(others, self._extents[self._others])
            self._in_order_at = others
        self._check_memory(tensors, grads, self._extents[self._grads])
        self._checked = grads, others

    def _check_memory(self, tensors: Tensors, begins: Int64s, extents: Int64s) -> None:
        if _overlap_others(begins, begins + extents, self._others_in_order):
            checks.no_shared_memory((name, local(tensors[slot])) for slot, name in self._names.items())
        if not _overlap_each_other(begins, extents):
            return
        distances = begins - begins[0]
        if self._may_lie_so is None or not np.array_equal(distances, self._may_lie_so):  # interleaved, say
            checks.no_shared_gradients(local(tensors[slot]) for slot in self._grads.tolist())
            self._may_lie_so = distances

    def finish(self, tensors: Tensors, amp: Amp) -> None:
        """What is left to do after the kernels."""
        for slot in self._apart:
            _divide(parts_in_memory(local(tensors[slot])), amp)
        torch.autograd.graph.increment_version([tensors[slot] for slot in self._grads.tolist()])


def _in_order(begins: Int64s, extents: Int64s) -> tuple[Int64s, Int64s]:
    """Where spans begin, in this order, and how far each of them and all before it reach."""
    order = np.argsort(begins)
    return begins[order], np.maximum.accumulate((begins + extents)[order])


def _overlap_each_other(begins: Int64s, extents: Int64s) -> bool:
    begins, reach = _in_order(begins, extents)
    return bool((reach[:-1] > begins[1:]).any())


def _overlap_others(begins: Int64s, ends: Int64s, others: tuple[Int64s, Int64s]) -> bool:
    other_begins, reach = others
    before = np.searchsorted(other_begins, ends) - 1  # the last of the others that begins before the end
    return bool(((before >= 0) & (reach[before] > begins)).any()) if len(reach) else False


def _divide(grad: Tensor, amp: Amp) -> None:
    if grad._is_zerotensor():  # zeros stay zeros, without memory
        return
    scale, found_inf = (None if t is None else t.reshape(()) for t in amp.on(grad.device))
    assert scale is not None
    unscaled = (grad.to(torch.promote_types(grad.dtype, torch.float32)) / scale).to(grad.dtype)
    grad.copy_(unscaled if found_inf is None else torch.where(found_inf == 0, unscaled, grad))
