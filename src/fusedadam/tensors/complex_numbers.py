"""Complex tensors as kernels see them: real and imaginary parts side by side, as torch.optim treats them.

Only kernels see the parts. Parameters, gradients and states stay complex tensors everywhere else, as in torch.optim.
"""

from __future__ import annotations

import torch
from torch import Tensor

COMPLEX_DTYPES = (torch.complex64, torch.complex128, torch.complex32)


def parts(tensor: Tensor) -> Tensor:
    """The parts of a complex tensor: a real view with a last dimension of 2. Other tensors themselves."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def resolved_parts(tensor: Tensor) -> Tensor:
    """The parts of a tensor that may be lazily conjugated: then torch has no view of them, and this is a copy."""
    return parts(tensor.resolve_conj()) if tensor.is_conj() else parts(tensor)


def parts_in_memory(tensor: Tensor) -> Tensor:
    """A view of what memory holds: the parts of the conjugate, if the tensor is lazily conjugated. For what treats
    both alike, such as a norm or a division by a real number."""
    return parts(tensor.conj() if tensor.is_conj() else tensor)


def part_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex number; any other dtype itself."""
    return dtype.to_real() if dtype.is_complex else dtype
