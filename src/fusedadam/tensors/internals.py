"""The offsets in torch's C++ objects that the compiled snapshot loop reads, found at start-up.

Nothing is assumed about versions. Each word is searched for, and must agree with torch's own answer for several
different tensors. If one is not found, the loop is not used, and the snapshot falls back to Python, which asks torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

OBJECT_WORDS, IMPL_WORDS, STORAGE_WORDS = 6, 24, 8  # how many are read, at most as many as these objects have


class TensorWords(NamedTuple):
    """Offsets in words of 8 bytes."""

    impl: int  # in a tensor's Python object: the address of its C++ object, the TensorImpl
    storage: int  # in a TensorImpl: the address of its storage
    keys: int  # in a TensorImpl: its dispatch keys, among them the negative bit and ZeroTensor
    data: int  # in a storage: the address of its memory
    nbytes: int  # in a storage: its size in bytes


@functools.cache
def find() -> TensorWords | None:
    """The offsets, or None if one of them is not found."""
    samples = _samples()
    storages = [tensor.untyped_storage() for tensor in samples]
    impls, storage_impls = [t._cdata for t in samples], [s._cdata for s in storages]
    found = (
        _offset([id(t) for t in samples], OBJECT_WORDS, impls),
        _offset(impls, IMPL_WORDS, storage_impls),
        _offset(impls, IMPL_WORDS, [dispatch_keys(t) for t in samples]),
        _offset(storage_impls, STORAGE_WORDS, [s.data_ptr() for s in storages]),
        _offset(storage_impls, STORAGE_WORDS, [s.nbytes() for s in storages]),
    )
    return None if None in found else TensorWords(*found)  # type: ignore[arg-type]


def dispatch_keys(tensor: Tensor) -> int:
    """The bits that determine how torch treats a tensor: its memory alone does not tell its values."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def _samples() -> list[Tensor]:
    """Tensors that differ in every word to be found. The last two share the storage of the first."""
    with torch.inference_mode():
        inference = torch.zeros(5)
    plain = [torch.zeros(7, 5), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3, 4, dtype=torch.float64)]
    return [*plain, torch.nn.Parameter(torch.zeros(11)), inference, torch._neg_view(plain[0]), plain[0][1:]]


def _offset(addresses: list[int], count: int, expected: list[int]) -> int | None:
    """The first offset where the objects at these addresses have the expected words."""
    read: Callable[[int], Any] = (ctypes.c_uint64 * count).from_address
    rows = [list(read(address)) for address in addresses]
    return next((k for k in range(count) if [row[k] for row in rows] == expected), None)
