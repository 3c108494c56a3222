"""What is found in torch's objects is what torch itself says of them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fusedadam.engine.changes import internals


def word(address, k):
    return ctypes.c_uint64.from_address(address + 8 * k).value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(9), torch.nn.Parameter(torch.ones(2, 3)), torch.zeros(8)[3:], torch._neg_view(torch.ones(4)),
        torch.zeros(1, 2, 3, 4, 5).permute(4, 0, 2, 1, 3), torch.zeros(2, 3, 1, 2, 3, 2, 2)[1:].transpose(1, 5),
        torch.tensor(1.0, dtype=torch.bfloat16),
    ],
    ids=["plain", "parameter", "slice", "negated", "five dimensions", "seven dimensions", "no dimension"],
)  # fmt: skip
def test_the_words_are_what_torch_says(tensor):
    found = internals.find()
    assert found is not None, "this torch keeps them elsewhere: the plain look at tensors is used"
    impl = word(id(tensor), found.impl)
    storage = word(impl, found.storage)
    assert word(storage, found.data) == tensor.untyped_storage().data_ptr()
    assert word(storage, found.nbytes) == tensor.untyped_storage().nbytes()
    assert word(impl, found.keys) == internals.dispatch_keys(tensor)
    assert word(impl, found.offset) == tensor.storage_offset()
    assert word(impl, found.dimensions) == tensor.dim()
    assert internals._layout(tensor, found) == [*tensor.shape, *tensor.stride()]


def test_dtype_and_device_are_in_one_word():
    found = internals.find()
    assert found is not None
    tensors = [torch.zeros(2, dtype=d) for d in (*internals.SCALAR_TYPES, torch.int32)] + [
        torch.zeros(2, device="meta")
    ]
    kinds = [word(t._cdata, found.kind) & internals.HALF_WORD for t in tensors]
    assert len(set(kinds)) == len(tensors)
    assert kinds[1] == word(torch.ones(3, 1)._cdata, found.kind) & internals.HALF_WORD


def test_the_default_device_does_not_matter():
    internals.find.cache_clear()
    with torch.device("meta"):
        found = internals.find()
    internals.find.cache_clear()
    assert found == internals.find() is not None


def test_dispatch_keys_tell_a_negated_tensor_from_a_plain_one():
    plain = torch.ones(4)
    assert internals.dispatch_keys(plain) == internals.dispatch_keys(torch.ones(7))
    assert internals.dispatch_keys(plain) != internals.dispatch_keys(torch._neg_view(plain))


def test_a_word_that_is_not_there_is_not_found():
    memory = (ctypes.c_uint64 * 3)(1, 2, 3)
    address = ctypes.addressof(memory)
    assert internals._offset([address], 3, [3]) == 2
    assert internals._offset([address], 3, [4]) is None


def test_no_more_is_read_than_objects_have():
    """In torch 2.13 a TensorImpl has 176 bytes, and 192 were read."""
    size = getattr(ctypes.CDLL(None), "malloc_usable_size", None)
    if size is None:
        pytest.skip("this C library does not tell how large a piece of memory is")
    size.argtypes, size.restype = [ctypes.c_void_p], ctypes.c_size_t
    tensor = torch.zeros(3)
    assert torch.Tensor.__basicsize__ >= 8 * internals.OBJECT_WORDS
    assert 8 * (internals.find().keys + 1) <= size(tensor._cdata)
    assert size(tensor.untyped_storage()._cdata) >= 8 * internals.STORAGE_WORDS
