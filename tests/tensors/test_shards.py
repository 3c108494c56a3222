"""The local shard of a DTensor, in a world of one process; tests/distributed has larger ones."""

from __future__ import annotations

import pytest
import torch

from fusedadam.tensors import shards


def test_a_plain_tensor_is_its_own_shard():
    tensor = torch.zeros(3)
    assert not shards.is_dtensor(tensor)
    assert not shards.is_partial(tensor)
    assert shards.local(tensor) is tensor
    assert shards.sharding_of(tensor) is None
    assert shards.with_local(torch.zeros(5), tensor) is tensor
    assert shards.is_sharded_like(tensor, torch.zeros(3))
    assert shards.distributed_like(tensor, torch.zeros(3)) is tensor


def test_memory_is_told_apart_by_address_shape_and_strides():
    tensor = torch.zeros(4, 4)
    assert shards.memory_of(tensor) == shards.memory_of(tensor.detach())
    assert shards.memory_of(tensor) != shards.memory_of(tensor.t())
    assert shards.memory_of(tensor) != shards.memory_of(tensor[1:])


class FakeDTensor:
    """What sharding_of asks of a DTensor: shape, placements and the coordinate of this process in the mesh."""

    def __init__(self, shape, mesh_shape, at, placements):
        self.shape, self.placements = shape, placements
        self.device_mesh = type("Mesh", (), {"shape": mesh_shape, "get_coordinate": lambda _: at})()


@pytest.mark.parametrize(
    ("shape", "mesh", "at", "kinds", "expected"),
    [
        ((10, 4), (4,), (0,), ["s0"], (True, False, False, 10, 0)),
        ((10, 4), (4,), (3,), ["s0"], (True, False, False, 10, 9)),
        ((10, 4), (4,), (2,), ["s1"], (True, True, False, 10, 0)),
        ((10, 4), (2, 2), (1, 1), ["r", "s0"], (False, False, False, 10, 5)),
        ((10, 4), (2, 2), (1, 1), ["s0", "s1"], (True, True, False, 10, 5)),
        ((2, 4), (4,), (3,), ["s0"], (True, False, False, 2, 2)),
    ],
)
def test_rows_of_this_process(shape, mesh, at, kinds, expected, monkeypatch):
    tensor_module = pytest.importorskip("torch.distributed.tensor")
    kinds_of = {"r": tensor_module.Replicate(), "s0": tensor_module.Shard(0), "s1": tensor_module.Shard(1)}
    monkeypatch.setattr(shards, "is_dtensor", lambda tensor: True)
    found = shards.sharding_of(FakeDTensor(shape, mesh, at, [kinds_of[k] for k in kinds]))
    assert found[1:] == expected


def test_a_partial_tensor_has_no_value_yet(monkeypatch):
    tensor_module = pytest.importorskip("torch.distributed.tensor")
    monkeypatch.setattr(shards, "is_dtensor", lambda tensor: True)
    with pytest.raises(RuntimeError, match="with a Partial placement"):
        shards.sharding_of(FakeDTensor((4,), (2,), (0,), [tensor_module.Partial()]))
