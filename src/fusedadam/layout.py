"""Where the elements of a tensor lie: which layouts kernels walk in place, and copies for the rest.

A kernel sees each tensor as a flat run of memory, so all roles of a parameter must lie in the same order without
gaps. Contiguous, channels_last and transposed tensors do; whatever does not is copied in and, if written, back.
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlaps(tensor: Tensor) -> bool:
    """Whether two indices may share an element (expanded tensors do): in place, such a tensor has no one value."""
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


def lies_as(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    if tensor.stride() == strides:
        return True
    # the stride of a dimension of size 1, or of an empty tensor, says nothing
    rows = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() == 0 or all(size == 1 or own == wanted for size, own, wanted in rows)


def copy_with(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
