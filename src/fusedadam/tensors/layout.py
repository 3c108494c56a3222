"""Where the elements of a tensor lie: which layouts kernels walk in place, and copies for the rest.

A kernel sees each tensor as a flat run of memory, so all roles of a parameter must lie in the same order without
gaps. Contiguous, channels_last and transposed tensors do; whatever does not is copied in and, if written, back.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_WORK = 100_000  # steps of numpy's search for a common element


def overlaps(tensor: Tensor) -> bool:
    """Whether two indices may share an element, as in an expanded tensor, which cannot be updated in place."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride < extent:
                return True
            extent += (size - 1) * stride
    return False


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a run of memory without gap or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted((d, s) for d, s in zip(tensor.stride(), tensor.shape, strict=True) if s != 1):
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


def dense_strides(tensor: Tensor, by_rows: bool = False) -> tuple[int, ...]:
    """The strides that the roles of this parameter have: its own, or those of a gapless copy.

    With ``by_rows``, each row (index of dimension 0) must lie in one piece, and the rows in their order.
    """
    strides: tuple[int, ...] = tensor.stride()
    if not is_dense(tensor):
        strides = torch.empty_like(tensor, device="meta").stride()
    if by_rows and tensor.dim() > 1 and tensor.shape[0] > 1 and strides[0] * tensor.shape[0] != tensor.numel():
        return torch.empty(tensor.shape, device="meta").stride()
    return strides


def is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the values: not negated (torch's negative bit), nor zeros that have no memory at all."""
    return not (tensor.is_neg() or tensor._is_zerotensor())


def address_of(tensor: Tensor) -> int:
    """The address of the first element; 0 where there is no memory."""
    return 0 if tensor._is_zerotensor() else tensor.data_ptr()


def extent(tensor: Tensor) -> int:
    """The bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def has_memory(tensor: Tensor) -> bool:
    """Whether there is memory for every element: a storage may have been resized under its tensor."""
    if tensor.numel() == 0 or tensor._is_zerotensor():
        return True
    begin = tensor.storage_offset() * tensor.element_size()
    needed = tensor.nbytes if tensor.is_contiguous() else extent(tensor)
    return tensor.data_ptr() != 0 and begin + needed <= tensor.untyped_storage().nbytes()


class Span:
    """The memory of a tensor, gaps included, to be compared with that of others on its device."""

    def __init__(self, tensor: Tensor) -> None:
        self.begin, self.size = address_of(tensor), tensor.element_size()
        self.end = self.begin + extent(tensor)
        self._dense, self._shape = is_dense(tensor), tuple(tensor.shape)
        self._strides = tuple(self.size * stride for stride in tensor.stride())
        pairs = zip(self._strides, self._shape, strict=True)
        self._period = math.gcd(*(stride for stride, size in pairs if size > 1))  # all elements are multiples apart

    def shares(self, other: Span) -> bool:
        """Whether some element of one lies where one of the other does, which follows from the strides alone.

        For the few layouts where that would take too long the answer is yes.
        """
        if self.begin >= other.end or other.begin >= self.end:
            return False
        if self._dense and other._dense:
            return True
        if period := math.gcd(self._period, other._period):  # columns of one matrix differ here already
            distance = (other.begin - self.begin) % period
            if self.size <= distance <= period - other.size:
                return False
        try:
            return bool(np.shares_memory(self._described, other._described, max_work=MAX_WORK))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True

    @functools.cached_property
    def _described(self) -> npt.NDArray[Any]:
        """An array with the same addresses, on whatever device they are. It must never be read."""
        layout = {"version": 3, "typestr": f"|V{self.size}", "data": (self.begin, True)}
        layout |= {"shape": self._shape, "strides": self._strides}
        return np.asarray(SimpleNamespace(__array_interface__=layout))


def lies_as(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    if tensor.stride() == strides:
        return True
    # the stride of a dimension of size 1, or of an empty tensor, says nothing
    rows = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(size == 1 or own == wanted for size, own, wanted in rows)


def copy_with(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
