"""What is found in torch's objects is what torch itself says of them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fusedadam.tensors import internals


def word(address, k):
    return ctypes.c_uint64.from_address(address + 8 * k).value


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(9), torch.nn.Parameter(torch.ones(2, 3)), torch.zeros(8)[3:], torch._neg_view(torch.ones(4))],
    ids=["plain", "parameter", "slice", "negated"],
)
def test_the_words_lead_to_address_size_and_keys(tensor):
    found = internals.find()
    assert found is not None, "this torch keeps them elsewhere: the plain look at tensors is used"
    impl = word(id(tensor), found.impl)
    storage = word(impl, found.storage)
    assert word(storage, found.data) == tensor.untyped_storage().data_ptr()
    assert word(storage, found.nbytes) == tensor.untyped_storage().nbytes()
    assert word(impl, found.keys) == internals.dispatch_keys(tensor)


def test_dispatch_keys_tell_a_negated_tensor_from_a_plain_one():
    plain = torch.ones(4)
    assert internals.dispatch_keys(plain) == internals.dispatch_keys(torch.ones(7))
    assert internals.dispatch_keys(plain) != internals.dispatch_keys(torch._neg_view(plain))


def test_a_word_that_is_not_there_is_not_found():
    memory = (ctypes.c_uint64 * 3)(1, 2, 3)
    address = ctypes.addressof(memory)
    assert internals._offset([address], 3, [3]) == 2
    assert internals._offset([address], 3, [4]) is None
