"""Sharded parameters get the same results as in one process, given the same gradients.

Element-wise rules give the same bits. Sums over shards are added in another order, so rules that sum give the same
results up to the rounding of these sums.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.follow import follow
from tests.distributed.parts import S0, S1, R, digest, mesh_of, parameter, which_part
from tests.distributed.reference import OPTIMIZERS, QUICK_REST, REST, SUMMING, load


def fsdp2(start: list[Tensor], *mesh: int, **options: Any) -> list[Any]:
    return all_but_scalars_sharded([torch.nn.Parameter(v.clone()) for v in start], mesh_of(*mesh), **options)


def all_but_scalars_sharded(params: list[Any], mesh: Any, **options: Any) -> list[Any]:
    """FSDP2 refuses scalars: they stay with every process."""
    module = torch.nn.ParameterList(p for p in params if p.dim())
    fully_shard(module, mesh=mesh, **options)
    sharded = iter(module)
    return [next(sharded) if p.dim() else p for p in params]


def placed(*placements: Any) -> Callable[..., list[Any]]:
    """Each parameter has the next of the placements, over a mesh of as many dimensions."""

    def divide(start: list[Tensor], *mesh: int) -> list[Any]:
        each = zip(start, itertools.cycle(placements), strict=False)
        return [parameter(v, mesh_of(*mesh), *own) for v, own in each]

    return divide


def fsdp2_over_tensor_parallel(start: list[Tensor], *mesh: int) -> list[Any]:
    """As after parallelize_module and fully_shard: FSDP2 divides what tensor parallel has left."""
    both = mesh_of(*mesh)
    params = [
        parameter(value, both["b"], placement) if value.dim() else torch.nn.Parameter(value.clone())
        for value, placement in zip(start, itertools.cycle((S0, S1, R)), strict=False)
    ]
    params = all_but_scalars_sharded(params, both["a"])
    kinds = {type(p).__name__ for param in params if isinstance(param, DTensor) for p in param.placements}
    assert kinds == {"_StridedShard", "Shard", "Replicate"}
    return params


def fsdp2_along_columns(start: list[Tensor], *mesh: int) -> list[Any]:
    """fully_shard may be told to divide another dimension."""
    return fsdp2(start, *mesh, shard_placement_fn=lambda p: S1 if p.dim() == 2 and p.shape[1] % 2 == 0 else None)


LAYOUTS: dict[str, tuple[Callable[..., list[Any]], tuple[int, ...]]] = {
    "FSDP2 on 2": (fsdp2, (2,)),
    "FSDP2 along columns on 2": (fsdp2_along_columns, (2,)),
    "Shard(1) on 2": (placed([S1]), (2,)),
    "Replicate on 2": (placed([R]), (2,)),
    "tensor parallel on 2": (placed([S1], [R], [S0]), (2,)),
    "FSDP2 on 3": (fsdp2, (3,)),
    "tensor parallel on 3": (placed([S1], [S0]), (3,)),
    "HSDP on 4": (fsdp2, (2, 2)),
    "FSDP2 over tensor parallel on 4": (fsdp2_over_tensor_parallel, (2, 2)),
    "rows and columns on 4": (placed([S0, S1], [S1, S0], [S0, S0], [S1, S1]), (2, 2)),
    "columns and rows on 4": (placed([S1, S1], [S0, S0], [S1, S0], [S0, S1]), (2, 2)),
    "with replicas on 4": (placed([R, S1], [S0, R], [S1, R], [R, R]), (2, 2)),
}
ON = {size: [name for name, (_, mesh) in LAYOUTS.items() if torch.Size(mesh).numel() == size] for size in (2, 3, 4)}


def train(layout: str, optimizer: str, path: str) -> list[Any]:
    run = load(path)
    divide, mesh = LAYOUTS[layout]
    params = divide(run.start, *mesh)
    opt = follow(run, optimizer, params)
    return [(which_part(p), digest([p, *(v for n, v in opt.state[p].items() if n != "step")])) for p in params]


def assert_equals_one_process(world: Any, layout: str, optimizer: str, dtype: str, library: Any) -> None:
    answers = world.run(train, layout, optimizer, library.path(optimizer, dtype))
    seen: dict[Any, set[str]] = defaultdict(set)
    for parts in answers:
        for k, (which, bits) in enumerate(parts):
            seen[k, which].add(bits)
    assert all(len(bits) == 1 for bits in seen.values()), "processes that hold the same part differ"


# every layout in float32; the other dtypes have other kernels, but are divided in the same way
EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS)
# each optimizer with one of the other dtypes, and with both in the exhaustive tests
OTHERS = pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.exhaustive] if (i + k) % 2 else [])
        for i, name in enumerate(OPTIMIZERS)
        for k, dtype in enumerate(("bfloat16", "float64"))
    ],
)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("layout", ON[2])
def test_on_two(two, library, layout, optimizer):
    assert_equals_one_process(two, layout, optimizer, "float32", library)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("layout", ON[3])
def test_on_three(three, library, layout, optimizer):
    assert_equals_one_process(three, layout, optimizer, "float32", library)


@EVERY_OPTIMIZER
@pytest.mark.parametrize("layout", ON[4])
def test_on_four(four, library, layout, optimizer):
    assert_equals_one_process(four, layout, optimizer, "float32", library)


@pytest.mark.parametrize("optimizer", QUICK_REST)
@pytest.mark.parametrize("layout", ["FSDP2 on 2", "tensor parallel on 2"])
def test_the_rest_on_two(two, library, layout, optimizer):
    assert_equals_one_process(two, layout, optimizer, "float32", library)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", REST)
@pytest.mark.parametrize("layout", ON[4])
def test_the_rest_on_four(four, library, layout, optimizer):
    assert_equals_one_process(four, layout, optimizer, "float32", library)


@OTHERS
@pytest.mark.parametrize("layout", ["FSDP2 on 2", "tensor parallel on 2"])
def test_other_dtypes_on_two(two, library, layout, optimizer, dtype):
    assert_equals_one_process(two, layout, optimizer, dtype, library)


@OTHERS
@pytest.mark.parametrize("layout", ["rows and columns on 4"])
def test_other_dtypes_on_four(four, library, layout, optimizer, dtype):
    assert_equals_one_process(four, layout, optimizer, dtype, library)


@pytest.mark.parametrize("optimizer", [name for name in SUMMING if name.startswith("AdamP")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_projection_occurs(library, optimizer, dtype):
    made = load(library.path(optimizer, dtype)).projections
    assert set(itertools.chain(*made)) == {"channel", "layer", "none"}
