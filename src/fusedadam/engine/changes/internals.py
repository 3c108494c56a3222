"""The offsets in torch's C++ objects that the compiled snapshot loop reads, found at start-up.

Nothing is assumed about versions. Each word is searched for, and must agree with torch's own answer for several
different tensors. If one is not found, the loop is not used, and the snapshot falls back to Python, which asks torch.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

OBJECT_WORDS, STORAGE_WORDS = 6, 8  # how many are read, at most as many as these objects have
LARGEST_IMPL = 24  # words of a TensorImpl, at most. The last one has its dispatch keys: the 22nd in torch 2.13
INLINE = 5  # dimensions whose sizes and strides are in the TensorImpl itself; with more, it has a pointer to them
WORD, HALF_WORD = 2**64 - 1, 2**32 - 1
CPU = 0xFF00  # the device in a TensorImpl: its type, 0, and its index, -1 for "none"
SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}  # c10::ScalarType


class TensorWords(NamedTuple):
    """Offsets in words of 8 bytes."""

    impl: int  # in a tensor's Python object: the address of its C++ object, the TensorImpl
    storage: int  # in a TensorImpl: the address of its storage
    dimensions: int  # in a TensorImpl: their number, followed by 5 sizes and 5 strides or a pointer to more
    offset: int  # in a TensorImpl: the elements of its storage before its first one
    kind: int  # in a TensorImpl: its dtype and device, in the lower half
    keys: int  # in a TensorImpl: its dispatch keys, among them the negative bit and ZeroTensor
    data: int  # in a storage: the address of its memory
    nbytes: int  # in a storage: its size in bytes
    deleter: int  # in a storage: the function that frees its memory
    version: int  # in a TensorImpl: the address of its version counter, whose third word begins with the version
    shared: int  # no offset: the deleter of memory that two tensors share until one is written (torch._lazy_clone)


@functools.cache
def find() -> TensorWords | None:
    """The offsets, or None if one of them is not found."""
    samples = _samples()
    storages = [tensor.untyped_storage() for tensor in samples]
    impls, storage_impls = [t._cdata for t in samples], [s._cdata for s in storages]
    clones = [torch._lazy_clone(sample) for sample in _samples()[:2]]
    lazy = [clone.untyped_storage()._cdata for clone in clones]
    deleter = _constant(storage_impls, lazy, STORAGE_WORDS)
    keys = _offset(impls, LARGEST_IMPL, [dispatch_keys(t) for t in samples])
    words = 0 if keys is None else keys + 1
    found = (
        _offset([id(t) for t in samples], OBJECT_WORDS, impls),
        _offset(impls, words, storage_impls),
        _offset(impls, words, [t.dim() for t in samples]),
        _offset(impls, words, [int(t.storage_offset()) for t in samples]),
        _offset(impls, words, [CPU << 16 | SCALAR_TYPES[t.dtype] for t in samples], HALF_WORD),
        keys,
        _offset(storage_impls, STORAGE_WORDS, [s.data_ptr() for s in storages]),
        _offset(storage_impls, STORAGE_WORDS, [s.nbytes() for s in storages]),
        deleter,
        _version_offset(words),
        None if deleter is None else _words(lazy[0], STORAGE_WORDS)[deleter],
    )
    if None in found:
        return None
    at = TensorWords(*found)  # type: ignore[arg-type]
    elsewhere = torch.empty(7, device="meta")
    is_right = all(_layout(t, at) == [*t.shape, *t.stride()] for t in samples)
    return at if is_right and _words(elsewhere._cdata, words)[at.kind] >> 16 & 0xFFFF != CPU else None


def _version_offset(count: int) -> int | None:
    """A tensor shares the counter of its versions with what is detached from it, and nothing else but its storage."""
    tensors = [torch.zeros(3, device="cpu") for _ in range(4)]
    for k, tensor in enumerate(tensors):
        for _ in range(k):
            tensor.add_(1)
    rows, detached = ([_words(t._cdata, count) for t in each] for each in (tensors, [t.detach() for t in tensors]))
    storages = [t.untyped_storage()._cdata for t in tensors]
    shared = [
        k
        for k, words in enumerate(zip(*rows, strict=True))
        if list(words) == [row[k] for row in detached] and len({*words}) == len(tensors) and list(words) != storages
    ]
    if len(shared) != 1:
        return None
    versions = [_words(row[shared[0]], 3)[2] & HALF_WORD for row in rows]
    return shared[0] if versions == [t._version for t in tensors] else None


def dispatch_keys(tensor: Tensor) -> int:
    """The bits that determine how torch treats a tensor: its memory alone does not tell its values."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def _samples() -> list[Tensor]:
    """Tensors that differ in every word to be found. The last two share the storage of the first."""
    zeros = functools.partial(torch.zeros, device="cpu")  # whatever the default device is
    with torch.inference_mode():
        inference = zeros(5)
    plain = [zeros(7, 5), zeros(3, dtype=torch.bfloat16), zeros(2, 3, 4, dtype=torch.float64)]
    many = [zeros(*range(2, 2 + dimensions), dtype=torch.float16) for dimensions in (INLINE, INLINE + 1)]
    return [*plain, *many, torch.nn.Parameter(zeros(11)), inference, torch._neg_view(plain[0]), plain[0][1:]]


def _offset(addresses: list[int], count: int, expected: list[int], mask: int = WORD) -> int | None:
    """The first offset where the objects at these addresses have the expected words, or parts of words. Nothing behind
    it is read."""
    rows = ([_words(address + 8 * k, 1)[0] & mask for address in addresses] for k in range(count))
    return next((k for k, row in enumerate(rows) if row == expected), None)


def _constant(addresses: list[int], others: list[int], count: int) -> int | None:
    """The first offset where the objects have the same word, and the others the same as each other, but another one."""
    rows, other_rows = ([_words(address, count) for address in each] for each in (addresses, others))
    for k in range(count):
        values, other_values = {row[k] for row in rows}, {row[k] for row in other_rows}
        if len(values) == len(other_values) == 1 and values != other_values:
            return k
    return None


def _layout(tensor: Tensor, at: TensorWords) -> list[int]:
    """Sizes and strides, read as the compiled loop reads them."""
    words, count = _words(tensor._cdata, at.keys + 1)[at.dimensions + 1 :], tensor.dim()
    if count <= INLINE:
        return words[:count] + words[INLINE : INLINE + count]
    return _words(words[0], 2 * count)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))
