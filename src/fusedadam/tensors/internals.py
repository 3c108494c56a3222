"""Where torch keeps what the compiled look at tensors reads: words of its C++ objects, found at start-up.

Nothing is assumed about versions. Each word is searched for, and must be what torch itself says of a dozen different
tensors; where one is not found the compiled look is not used, and the plain one, which asks torch, takes its place.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

OBJECT_WORDS, IMPL_WORDS, STORAGE_WORDS = 6, 24, 8  # no more than these objects have


class TensorWords(NamedTuple):
    """Which word of one object is, or leads to, the next."""

    impl: int  # of a tensor's Python object: its C++ object, the TensorImpl
    storage: int  # of a TensorImpl: its storage
    keys: int  # of a TensorImpl: its dispatch keys, of which the negative bit and "all zeros without memory" are two
    data: int  # of a storage: the address of its memory
    nbytes: int  # of a storage: how many bytes it has


@functools.cache
def find() -> TensorWords | None:
    """None where a word is not found."""
    samples = _samples()
    storages = [tensor.untyped_storage() for tensor in samples]
    impls, stores = [t._cdata for t in samples], [s._cdata for s in storages]
    found = (
        _word([id(t) for t in samples], OBJECT_WORDS, impls),
        _word(impls, IMPL_WORDS, stores),
        _word(impls, IMPL_WORDS, [dispatch_keys(t) for t in samples]),
        _word(stores, STORAGE_WORDS, [s.data_ptr() for s in storages]),
        _word(stores, STORAGE_WORDS, [s.nbytes() for s in storages]),
    )
    return None if None in found else TensorWords(*found)  # type: ignore[arg-type]


def dispatch_keys(tensor: Tensor) -> int:
    """What torch does with a tensor depends on these bits; a kernel that only sees memory must know them, too."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def _samples() -> list[Tensor]:
    """Tensors that differ in everything that is to be found. The first are plain, the last share a storage."""
    with torch.inference_mode():
        inference = torch.zeros(5)
    plain = [torch.zeros(7, 5), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3, 4, dtype=torch.float64)]
    return [*plain, torch.nn.Parameter(torch.zeros(11)), inference, torch._neg_view(plain[0]), plain[0][1:]]


def _word(addresses: list[int], count: int, expected: list[int]) -> int | None:
    """The first word that is as expected in all objects at these addresses."""
    read: Callable[[int], Any] = (ctypes.c_uint64 * count).from_address
    rows = [list(read(address)) for address in addresses]
    return next((k for k in range(count) if [row[k] for row in rows] == expected), None)
