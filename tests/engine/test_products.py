"""Memory for products of matrices: how much, how matrices share it, and the same bits in parts."""

from __future__ import annotations

import pytest
import torch

from fusedadam import Muon
from fusedadam.engine import products
from fusedadam.tensors.matrices import Matrices
from tests.support import F32

CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param("triton", id="triton")])


def stepped(shapes, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer = Muon(params, lr=0.1, ns_steps=3, backend=backend)
    optimizer.step()
    return [param.detach() for param in params], list(optimizer._stepper.last_plan.launches)


def limited(monkeypatch, limit):
    monkeypatch.setattr(products, "SMALLEST_LIMIT", limit)
    monkeypatch.setattr(products, "LARGEST_SHARE", 0.0)


def memory_of(launches):
    (nbytes,) = {launch.table.operands.untyped_storage().nbytes() for launch in launches}
    assert len({launch.table.operands.data_ptr() for launch in launches}) == 1
    return nbytes


@BACKENDS
def test_batches_share_memory_and_have_the_same_bits(backend, monkeypatch):
    shapes = [(16, 24)] * 5 + [(24, 8)]
    expected, launches = stepped(shapes, backend)
    assert [len(launch.table) for launch in launches] == [5, 1]
    one = 16 * 24 * 4 + (launches[0].backend.scratch(Matrices(1, 16, 24), F32, CPU) or 16 * 24 * products.TORCHS_BYTES)
    limited(monkeypatch, 2 * one)
    found, launches = stepped(shapes, backend)
    assert [len(launch.table) for launch in launches] == [2, 2, 1, 1]
    assert 2 * 16 * 24 * 4 <= memory_of(launches) <= 2 * one
    assert all(map(torch.equal, found, expected))


def test_a_stack_beyond_the_limit_is_multiplied_in_parts(monkeypatch):
    expected, launches = stepped([(5, 16, 24)], "triton")
    operands, one = 5 * 16 * 24 * 4, launches[0].backend.scratch(Matrices(1, 16, 24), F32, CPU)
    if one is None:
        pytest.skip("without tensor descriptors (Triton before 3.4), products are torch's own")
    assert memory_of(launches) == operands + 5 * one
    limited(monkeypatch, operands + 2 * one)
    found, launches = stepped([(5, 16, 24)], "triton")
    assert memory_of(launches) == operands + 2 * one
    limited(monkeypatch, 0)  # what one matrix needs is taken in any case
    again, launches = stepped([(5, 16, 24)], "triton")
    assert memory_of(launches) == operands + one
    assert torch.equal(found[0], expected[0])
    assert torch.equal(again[0], expected[0])
