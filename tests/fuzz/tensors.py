"""Values in every layout that torch knows, and views with its negative and conjugate bits."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedadam.tensors.layout import overlaps

# no dimension, no element, one element, dimensions of size 1, odd sizes, more than one block of a kernel
SHAPES = ((1,), (5,), (), (0,), (3, 0), (4, 3), (3, 3), (1, 7), (2, 3, 2, 2), (3, 1, 2, 1), (37,), (1030,))
LAYOUTS = ("contiguous", "transposed", "channels_last", "gaps", "offset")
GRADIENT_LAYOUTS = ("as the parameter", *LAYOUTS, "expanded")
VIEWS = ("plain", "negative", "imaginary part of a conjugate", "real part")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Of both signs and well away from zero, so that a wrong sign or a missing element shows in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.25 + 1.75 * torch.rand(shape, generator=generator, dtype=torch.float64)
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    return (size * sign).to(dtype)


def laid_out(source: Tensor, layout: str) -> Tensor:
    """A copy in memory of its own. ``expanded`` repeats the first row, so its values are others."""
    if layout == "transposed":
        backwards = tuple(reversed(range(source.dim())))
        return source.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards)
    if layout == "channels_last" and source.dim() == 4:
        return source.clone(memory_format=torch.channels_last)
    if layout == "gaps":
        return torch.stack([source, torch.full_like(source, 99.0)], dim=-1)[..., 0]
    if layout == "offset":
        return torch.cat([source.new_full((3,), 99.0), source.flatten()])[3:].view(source.shape)
    if layout == "expanded" and source.dim() and source.numel():
        return source[:1].clone().expand(source.shape)
    return source.clone(memory_format=torch.contiguous_format)


def gradient(source: Tensor, param: Tensor, layout: str, view: str) -> Tensor:
    """A gradient for ``param`` with the values of ``source``; bfloat16 and float16 have no complex views."""

    def placed(tensor: Tensor) -> Tensor:
        if layout == "as the parameter":
            return torch.empty_strided(tensor.shape, param.stride(), dtype=tensor.dtype).copy_(tensor)
        return laid_out(tensor, layout)

    has_complex = source.dtype in (torch.float32, torch.float64)
    if view == "real part" and has_complex:
        return placed(torch.complex(source, source)).real
    if view == "imaginary part of a conjugate" and has_complex:
        return placed(torch.complex(source, -source)).conj().imag
    if view in ("plain", "real part"):
        return placed(source)
    return torch._neg_view(placed(-source))


def plain(tensor: Tensor) -> Tensor:
    """What a tensor says, as a contiguous copy without bits."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def is_expanded(tensor: Tensor) -> bool:
    return overlaps(tensor)
