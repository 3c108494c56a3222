"""Each entry gives the same on every torch, whether or not it has the feature."""

import torch
from torch.distributed.tensor import Replicate, Shard

from fusedadam import compat
from tests.distributed.parts import mesh_of

WHOLE = torch.arange(35.0).view(7, 5)


def shards(without_src_data_rank: bool):
    if without_src_data_rank:
        signature = compat.inspect.signature

        def old(function):
            found = signature(function)
            return found.replace(parameters=[p for n, p in found.parameters.items() if n != "src_data_rank"])

        compat.inspect.signature = old
    placements = ([Shard(0)], [Shard(1)], [Replicate()])
    try:
        return [compat.distribute(WHOLE, mesh_of(2), p).to_local() for p in placements]
    finally:
        if without_src_data_rank:
            compat.inspect.signature = signature


def test_every_process_takes_its_shard(two):
    first, second = two.run(shards, False)
    assert torch.equal(torch.cat([first[0], second[0]]), WHOLE)
    assert torch.equal(torch.cat([first[1], second[1]], 1), WHOLE)
    assert torch.equal(first[2], WHOLE)


def test_as_older_versions_do_it(two):
    for new, old in zip(two.run(shards, False), two.run(shards, True), strict=True):
        assert all(map(torch.equal, new, old))
