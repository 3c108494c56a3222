"""Layouts of tensors: which ones kernels can walk in place, copies for the others, and which tensors share memory.

A kernel sees each tensor as one flat run of memory, so all roles of a parameter must be stored in the same order and
without gaps. Contiguous, channels_last and transposed tensors are; others are copied before a launch and, if they were
written, copied back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_WORK = 100_000  # limit on the steps of numpy's search for a shared element

PER_BLOCK = 32  # neighbors in memory that share a word of an array by block
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


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
    """Whether the elements fill a run of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((d, s) for d, s in zip(tensor.stride(), tensor.shape, strict=True) if s != 1):
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


def dense_strides(tensor: Tensor, by_rows: bool = False) -> tuple[int, ...]:
    """The strides for all roles of this parameter: its own strides, or the strides of a copy without gaps.

    With ``by_rows``, each row (index of dimension 0) must be contiguous, and the rows must be stored in order.
    """
    strides: tuple[int, ...] = tensor.stride()
    if not is_dense(tensor):
        strides = torch.empty_like(tensor, device="meta").stride()
    if by_rows and tensor.dim() > 1 and tensor.shape[0] > 1 and strides[0] * tensor.shape[0] != tensor.numel():
        return row_major_strides(tensor)
    return strides


def row_major_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor of this shape whose elements are stored in their logical order."""
    return torch.empty(tensor.shape, device="meta").stride()


def is_row_major(tensor: Tensor) -> bool:
    """Whether the elements are stored in their logical order. Gaps between them do not count: copies have none."""
    return tensor.is_contiguous() or (not is_dense(tensor) and _gapless(tensor).is_contiguous())


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the elements are stored in the order of torch.channels_last, and not also in their logical order."""
    order = CHANNELS_LAST.get(tensor.dim())
    return order is not None and not is_row_major(tensor) and _gapless(tensor).is_contiguous(memory_format=order)


def _gapless(tensor: Tensor) -> Tensor:
    """The layout of a copy, without memory."""
    return torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))


def ordered_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of arrays by element whose elements are counted, as noise and blocks do: in the order of
    channels_last if the tensor is stored so, else in the logical order."""
    return _gapless(tensor).stride() if is_channels_last(tensor) else row_major_strides(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory holds the values: without torch's negative and conjugate bits, and not a ZeroTensor, which has
    no memory."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())


def address_of(tensor: Tensor) -> int:
    """The address of the first element; 0 for a ZeroTensor."""
    return 0 if tensor._is_zerotensor() else tensor.data_ptr()


def extent(tensor: Tensor) -> int:
    """The bytes from the first element to the end of the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage has memory for every element; it may have been resized since the tensor was created."""
    if tensor.numel() == 0 or tensor._is_zerotensor():
        return True
    begin = tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr() != 0 and begin + extent(tensor) <= tensor.untyped_storage().nbytes()


class Span:
    """The memory of a tensor, gaps included. Compares it with other tensors on the same device."""

    def __init__(self, tensor: Tensor) -> None:
        self.begin, self.size = address_of(tensor), tensor.element_size()
        self.end = self.begin + extent(tensor)
        self._dense, self._shape = is_dense(tensor), tuple(tensor.shape)
        self._strides = tuple(self.size * stride for stride in tensor.stride())
        pairs = zip(self._strides, self._shape, strict=True)
        self._period = math.gcd(*(stride for stride, size in pairs if size > 1))  # divides the distances

    def shares(self, other: Span) -> bool:
        """Whether an element of one tensor overlaps an element of the other.

        The answer is exact, except for the few layouts where the search would take too long: there it is True.
        """
        if self.begin >= other.end or other.begin >= self.end:
            return False
        if self._dense and other._dense:
            return True
        if period := math.gcd(self._period, other._period):  # settles most cases, such as two columns of a matrix
            distance = (other.begin - self.begin) % period
            if self.size <= distance <= period - other.size:
                return False
        try:
            return bool(np.shares_memory(self._as_array, other._as_array, max_work=MAX_WORK))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True

    @functools.cached_property
    def _as_array(self) -> npt.NDArray[Any]:
        """An array with the same addresses and strides, also for memory on a device. It must never be read."""
        layout = {"version": 3, "typestr": f"|V{self.size}", "data": (self.begin, True)}
        layout |= {"shape": self._shape, "strides": self._strides}
        return np.asarray(SimpleNamespace(__array_interface__=layout))


def sharing(tensors: Iterable[tuple[str, Tensor]], ignored: tuple[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """The names of tensors that share memory, pair by pair, unless they are ``ignored``."""
    on_device: dict[torch.device, list[tuple[str, Span]]] = {}
    for name, tensor in tensors:
        if tensor.numel() and not tensor._is_zerotensor():
            on_device.setdefault(tensor.device, []).append((name, Span(tensor)))
    for spans in on_device.values():
        before: list[tuple[str, Span]] = []  # spans that end after the next one begins
        for name, span in sorted(spans, key=lambda named: named[1].begin):
            before = [named for named in before if named[1].end > span.begin]
            for other, theirs in before:
                if (other, name) != ignored and span.shares(theirs):
                    yield other, name
            before.append((name, span))


def has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether the elements are stored with these strides. Those of an empty tensor, or of a dimension of size 1, do
    not matter."""
    if tensor.stride() == strides or tensor.numel() == 0:
        return True
    dimensions = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in dimensions)


def copy_with(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy that has these strides."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def block_shape(shape: torch.Size, channels_last: bool = False) -> torch.Size:
    """The shape of an array by block that belongs to arrays of this shape by element: (8, 64) has (8, 2).

    Blocks run along the last dimension or, where 32 does not divide it, along all dimensions but the first:
    (64, 32, 3, 3) has (64, 9). In ``channels_last`` they run along the channels, and their array has these last, too:
    (64, 3, 3, 1). So the shape tells along what they run.
    """
    if len(shape) < 2 or shape[-1] % PER_BLOCK == 0:
        return torch.Size((*shape[:-1], shape[-1] // PER_BLOCK))
    if channels_last and len(shape) in CHANNELS_LAST:
        return torch.Size((shape[0], *shape[2:], shape[1] // PER_BLOCK))
    return torch.Size((shape[0], math.prod(shape[1:]) // PER_BLOCK))


def along_channels(shape: torch.Size, blocks: torch.Size) -> bool:
    """Whether ``blocks`` is the shape of an array by block that runs along the channels of ``shape``."""
    return len(shape) in CHANNELS_LAST and shape[-1] % PER_BLOCK != 0 and len(blocks) == len(shape)
