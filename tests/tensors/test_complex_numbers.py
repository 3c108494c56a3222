"""Complex tensors as real ones: views where torch has one, copies where it does not."""

from __future__ import annotations

import pytest
import torch

from fusedadam.tensors.complex_numbers import COMPLEX_DTYPES, part_dtype, parts, parts_in_memory, resolved_parts

Z = torch.tensor([1 + 2j, 3 - 4j])
PARTS = torch.tensor([[1.0, 2.0], [3.0, -4.0]])


@pytest.mark.parametrize("function", [parts, resolved_parts, parts_in_memory])
def test_parts_of_a_plain_tensor_are_a_view_and_real_tensors_themselves(function):
    assert torch.equal(function(Z), PARTS)
    assert function(Z).data_ptr() == Z.data_ptr()
    assert function(PARTS) is PARTS


def test_a_conjugate_is_resolved_in_a_copy_or_seen_as_in_memory():
    assert torch.equal(resolved_parts(Z.conj()), PARTS * torch.tensor([1.0, -1.0]))
    assert torch.equal(parts_in_memory(Z.conj()), PARTS)
    assert parts_in_memory(Z.conj()).data_ptr() == Z.data_ptr()


def test_a_negated_tensor_keeps_its_values():
    negated = torch._neg_view(Z)
    assert torch.equal(resolved_parts(negated), -PARTS)
    assert torch.equal(resolved_parts(negated.conj()), -PARTS * torch.tensor([1.0, -1.0]))


def test_dtypes_of_parts():
    assert [*map(part_dtype, COMPLEX_DTYPES)] == [torch.float32, torch.float64, torch.float16]
    assert part_dtype(torch.bfloat16) == torch.bfloat16
