"""Formats on torch's own tensors: how the eager backend, checkpoints and the creation of states read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fusedadam.formats.format import Format
from fusedadam.formats.noise import HALF
from fusedadam.formats.plain import round_to_odd
from fusedadam.formats.split import SPLIT_8, SPLIT_16
from fusedadam.tensors.layout import PER_BLOCK, along_channels

SLICE = 1 << 20


def load(fmt: Format, arrays: Sequence[Tensor], compute: torch.dtype) -> Tensor:
    """A copy, always: a rule may store one role in another, and must not see what has been stored already."""
    if fmt.is_native("eager"):
        return arrays[0].to(compute, copy=True)
    assert fmt.decode is not None
    words = [w.to(torch.int32, copy=True) for w in _words(fmt, arrays)]
    if fmt.by_block:
        words = [_in_blocks(words[0], words[1].shape), words[1][..., None]]
        return _out_of_blocks(fmt.decode(*words), arrays[0].shape).to(compute)
    value: Tensor = fmt.decode(*words)
    return value.to(compute)


def store(fmt: Format, arrays: Sequence[Tensor], value: Tensor, noise: Tensor | None = None) -> None:
    """Rounds once. torch itself takes float64 to 16 bits by way of float32, which rounds twice. ``noise``: words of the
    value's shape; without them it is rounded to nearest."""
    if value.dtype == torch.float64 and fmt.rounds:
        value = round_to_odd(value)
    if fmt.is_native("eager"):
        arrays[0].copy_(value)
        return
    assert fmt.encode is not None
    value, words = value.float(), _words(fmt, arrays)
    arguments = [HALF if noise is None else noise] if fmt.takes_noise else []
    if fmt.by_block:
        assert fmt.measure is not None
        assert fmt.of_block is not None
        blocks = words[1].shape
        measured = _in_blocks(fmt.measure(value, *arguments), blocks)
        by_block = fmt.of_block(measured.amax(-1))
        words[1].copy_(by_block)
        encoded = fmt.encode(measured, by_block[..., None], _in_blocks(value, blocks))
        words[0].copy_(_out_of_blocks(encoded, value.shape))
        return
    encoded = fmt.encode(value, *arguments)
    for target, new in zip(words, encoded if len(arrays) > 1 else [encoded], strict=True):
        target.copy_(new)


def join_low(weight: Tensor, low: Tensor) -> None:
    """Adds the low bits to a bfloat16 weight that has become float32 or float64. Where it has bits of its own, it
    stays. A slice at a time, so that temporaries stay small."""
    fmt, low = split_of(low), low.to(weight.device)
    rows = max(1, SLICE // max(1, weight[:1].numel())) if weight.dim() else 1
    # kernels write to inference tensors in any mode; torch does so in theirs only
    with torch.inference_mode() if weight.is_inference() else nullcontext():
        parts = zip(weight.split(rows), low.split(rows), strict=True) if weight.dim() else [(weight, low)]
        for here, bits in parts:
            high = here.to(torch.bfloat16)
            here.copy_(torch.where(high.to(here.dtype) == here, load(fmt, [high, bits], here.dtype), here))


def split_of(low: Tensor) -> Format:
    """The format of a weight with these low bits."""
    return SPLIT_8 if low.dtype == torch.int8 else SPLIT_16


def in_bytes(words: Tensor) -> Tensor:
    """A view of 16-bit words as bytes, two in a dimension of their own: neither NCCL nor gloo sends int16."""
    return words.unsqueeze(-1).view(torch.uint8)


def from_bytes(pairs: Tensor) -> Tensor:
    """The words again."""
    return pairs.contiguous().view(torch.int16).squeeze(-1)


def _in_blocks(words: Tensor, blocks: torch.Size) -> Tensor:
    """Words by element with those of a block in the last dimension. ``blocks``: the shape of the array by block."""
    if along_channels(words.shape, blocks):
        words = words.movedim(1, -1)
    return words.reshape(*blocks, PER_BLOCK)


def _out_of_blocks(words: Tensor, shape: torch.Size) -> Tensor:
    """The reverse, for arrays of this shape by element."""
    if along_channels(shape, words.shape[:-1]):
        return words.flatten(-2).movedim(-1, 1)
    return words.reshape(shape)


def _words(fmt: Format, arrays: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(arrays, fmt.arrays, strict=True)
    read = [(from_bytes(t) if a.dtype == torch.int16 and t.dtype == torch.uint8 else t, a) for t, a in pairs]
    return [tensor.view(getattr(torch, array.word)) for tensor, array in read]
