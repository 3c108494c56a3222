"""The local shard of a DTensor, in a world of one process; tests/distributed has larger ones."""

from __future__ import annotations

import itertools
import math

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


def test_tensors_without_elements_are_told_apart():
    """Of a small parameter some processes have no elements; two such shards were taken for the same."""
    tensor = torch.zeros(0, 4)
    assert shards.memory_of(tensor) == shards.memory_of(tensor.detach())
    assert shards.memory_of(tensor) != shards.memory_of(torch.zeros(0, 4))


class FakeDTensor:
    """What is asked of a DTensor here: shape, placements and the coordinate of this process in the mesh."""

    def __init__(self, shape, mesh_shape, at, placements):
        self.shape, self.placements = shape, placements
        self.device_mesh = type("Mesh", (), {"shape": mesh_shape, "get_coordinate": lambda _: at})()

    def dim(self):
        return len(self.shape)


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
    assert found[1:6] == expected
    sharded = {k: kind for k, kind in enumerate(kinds) if kind != "r"}
    assert found.along == tuple(tuple(k for k, kind in sharded.items() if kind == f"s{dim}") for dim in range(2))


def test_a_partial_tensor_has_no_value_yet(monkeypatch):
    tensor_module = pytest.importorskip("torch.distributed.tensor")
    monkeypatch.setattr(shards, "is_dtensor", lambda tensor: True)
    with pytest.raises(RuntimeError, match="with a Partial placement"):
        shards.sharding_of(FakeDTensor((4,), (2,), (0,), [tensor_module.Partial()]))


# --- where a shard's elements are in the whole parameter --------------------------------------------------------------


def placements_of(text):
    """``s0 s1``: one for each dimension of the mesh; ``s0*2`` is strided, with a split factor of 2."""
    tensor_module = pytest.importorskip("torch.distributed.tensor")
    from torch.distributed.tensor.placement_types import _StridedShard

    made = []
    for kind in text.split():
        dim, _, factor = kind[1:].partition("*")
        if kind == "r":
            made.append(tensor_module.Replicate())
        else:
            made.append(_StridedShard(int(dim), split_factor=int(factor)) if factor else tensor_module.Shard(int(dim)))
    return made


def cut(tensor, count, which, dim):
    """As torch.chunk does, but processes for which nothing is left get nothing."""
    size = -(-tensor.shape[dim] // count)
    begin = min(which * size, tensor.shape[dim])
    return tensor.narrow(dim, begin, min(size, tensor.shape[dim] - begin))


def by_brute_force(shape, mesh, at, placements):
    """The indices themselves, sharded: by plain placements from left to right, and then, as FSDP2 does it, what these
    have left by the strided ones."""
    held = torch.arange(torch.Size(shape).numel()).view(shape)
    shards = [one for one in zip(mesh, at, placements, strict=True) if not one[2].is_replicate()]
    # not by comparing: to torch 2.6 a strided placement equals a plain one
    plain, strided = ([one for one in shards if hasattr(one[2], "split_factor") == s] for s in (False, True))
    for size, coordinate, placement in [*plain, *reversed(strided)]:
        held = cut(held, size, coordinate, placement.dim)
    return held.flatten()


SHAPES = [(8, 6), (7, 6), (5, 9), (2, 6), (1, 8), (9, 4), (4, 6, 8), (3, 5, 7), (1, 4, 6), (6, 1, 4), (0, 4), (13,)]


MESHES = [
    ((2,), "s0"), ((3,), "s0"), ((5,), "s0"), ((2,), "s1"), ((3,), "s1"), ((2,), "s2"), ((4,), "s2"), ((2,), "r"),
    ((2, 2), "r s0"), ((2, 3), "s0 r"), ((2, 2), "s0 s0"), ((3, 2), "s0 s1"), ((2, 3), "s1 s0"), ((2, 2), "s1 s1"),
    ((2, 2), "s0 s2"), ((2, 2), "s1 s2"), ((2, 2), "s2 s2"), ((2, 2), "s0*2 s0"), ((4, 2), "s0*2 s0"),
    ((2, 3), "s0*3 s0"), ((2, 2), "s1*2 s1"), ((4, 2), "s1*2 s1"), ((2, 2, 2), "s0 s1 s2"),
    ((2, 2, 2), "r s0*2 s0"), ((2, 2, 2), "s0*2 s0 s1"), ((2, 2, 2), "s0*4 s0*2 s0"), ((2, 2, 2), "s0*4 s0 s0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "mesh", "kinds"),
    [(shape, *own) for shape in SHAPES for own in MESHES if max(own[1].replace("*", " ").split()) < f"s{len(shape)}"],
    ids=str,
)
def test_every_element_of_a_shard_is_found_in_the_whole_parameter(shape, mesh, kinds, monkeypatch):
    placements = placements_of(kinds)
    monkeypatch.setattr(shards, "is_dtensor", lambda tensor: True)
    every = []
    for at in itertools.product(*map(range, mesh)):
        expected = by_brute_force(shape, mesh, at, placements)
        mapped = shards.index_map(FakeDTensor(torch.Size(shape), mesh, at, placements))
        i = torch.arange(len(expected))
        assert torch.equal(mapped.index_of(i), expected), f"at {at}"
        assert len(expected) == 0 or mapped.is_one_run == bool((expected == expected[0] + i).all()), f"at {at}"
        every.append(expected)
    replicas = math.prod(size for size, p in zip(mesh, placements, strict=True) if p.is_replicate())
    counts = torch.bincount(torch.cat(every), minlength=torch.Size(shape).numel())
    assert counts.eq(replicas).all(), "each element is somewhere"


def test_shards_of_many_dimensions_are_refused(monkeypatch):
    monkeypatch.setattr(shards, "is_dtensor", lambda tensor: True)
    param = FakeDTensor(torch.Size((4, 4, 4, 4)), (2, 2, 2), (0, 0, 0), placements_of("s1 s2 s3"))
    with pytest.raises(RuntimeError, match="sharded along too many dimensions for stochastic rounding"):
        shards.index_map(param)


def test_a_stride_of_another_origin_is_found_or_refused(monkeypatch):
    """Strides that no other placement explains, as a view of a DTensor may have."""
    monkeypatch.setattr(shards, "is_dtensor", lambda tensor: True)
    even, uneven = (FakeDTensor(torch.Size((rows, 2)), (2,), (0,), placements_of("s0*2")) for rows in (8, 9))
    assert shards.index_map(even).index_of(torch.arange(8)).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    with pytest.raises(RuntimeError, match="in strides of different lengths"):
        shards.index_map(FakeDTensor(torch.Size((14, 2)), (4,), (1,), placements_of("s0*3")))
    try:
        uneven.placements[0]._split_tensor(torch.arange(9), 2, with_padding=False, contiguous=False)
    except AssertionError:  # torch 2.6 has even ones only
        with pytest.raises(RuntimeError, match="in strides of different lengths"):
            shards.index_map(uneven)
    else:
        assert shards.index_map(uneven).index_of(torch.arange(10)).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("shape", "mesh", "kinds", "cuts"),
    [
        ((8, 128), (4,), "s0", False), ((8, 128), (4,), "s1", False), ((8, 128), (3,), "s1", True),
        ((8, 64), (4,), "s1", True), ((8, 96), (2,), "s1", True), ((8, 96), (3,), "s1", False),
        ((8, 128), (2, 2), "s1 s1", False), ((8, 64), (2, 2), "s1 s1", True), ((8, 64), (2, 2), "s0 s1", False),
        ((4, 8, 64), (2, 2), "s1 s2", False), ((4, 8, 64), (2, 4), "s1 s2", True), ((4, 8, 64), (4, 2), "s2 r", True),
        ((8, 128), (2, 2), "s1*2 s1", False), ((8, 64), (2, 2), "s1*2 s1", True), ((8, 32), (2,), "s1", True),
        ((8, 32), (2, 2), "r s0", False), ((8, 32 * 39), (40,), "s1", False), ((8, 32 * 79), (40,), "s1", False),
        ((64, 64, 3, 3), (2,), "s0", False), ((64, 64, 3, 3), (2,), "s1", True), ((64, 64, 3, 3), (1,), "s1", False),
        ((8, 160), (2, 2), "s1*2 s1", True), ((8, 32 * 79), (40, 2), "s1 s1", True),  # 39 times 64, and 32
    ],
    ids=str,
)  # fmt: skip
def test_blocks_that_are_cut(shape, mesh, kinds, cuts, monkeypatch):
    monkeypatch.setattr(shards, "is_dtensor", lambda tensor: True)
    found = {
        shards.cuts_blocks(FakeDTensor(torch.Size(shape), mesh, at, placements_of(kinds)))
        for at in itertools.product(*map(range, mesh))
    }
    assert found == {cuts}, "and every process says the same"
