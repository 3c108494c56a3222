"""Storage formats of sharded parameters: the bits of one process, for every way of sharding them.

Gradients are small multiples of a power of two, so that norms are exact in any order of summation: then clipping, too,
gives the same bits. AdamP's projections sum what is not exact, and have a test of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import fusedadam
from fusedadam.optimizers.stored import for_state_dict
from tests.distributed.parts import S0, S1, R, divided_like, mesh_of, parameter
from tests.distributed.test_same_results import all_but_scalars_sharded
from tests.support import BF16

S2 = Shard(2)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": functools.partial(fusedadam.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99)),
    "AdamP": functools.partial(fusedadam.AdamP, lr=1e-2, delta=0.0, max_grad_norm=1.0),  # it never projects
    "EmaAdamW": functools.partial(fusedadam.EmaAdamW, lr=1e-2, ema_decay=0.9, max_grad_norm=1.0),
    "BertAdam": functools.partial(fusedadam.BertAdam, lr=1e-2, warmup=0.3, t_total=20, max_grad_norm=0.5, clip="all"),
}
STORAGES = ("exact", "16bit", "8bit")
SHAPES = {
    "matrix": (64, 128),
    "smallest": (32, 128),  # a shard of it has fewer elements than 8 bits are for
    "uneven": (33, 128),
    "one row": (1, 4096),
    "experts": (4, 16, 64),
    "vector": (128,),
    "without blocks": (40, 120),
}
EIGHT_BITS = ("matrix", "smallest", "uneven", "one row", "experts")
STEPS = 4


def values(step: int, shape: Sequence[int]) -> Tensor:
    """Sums of their squares are exact in float32."""
    generator = torch.Generator().manual_seed(1000 * step + sum(shape))
    return torch.randint(-8, 9, tuple(shape), generator=generator) / 16


def start(dtype: torch.dtype = BF16) -> list[Tensor]:
    return [(values(99, shape) * 3).to(dtype) for shape in SHAPES.values()]


def go(opt: Any, params: Sequence[Any], steps: range) -> None:
    for step in steps:
        for p in params:
            p.grad = divided_like(values(step, p.shape).to(p.dtype), p)
        opt.step()


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def kept(opt: Any, param: Any) -> dict[str, Tensor]:
    """The weight and all arrays of its states, whole, as a state dict has them: no process group gathers int16."""
    return {"param": whole(param), **{name: whole(v) for name, v in for_state_dict(opt.state[param]).items()}}


@functools.cache
def alone(optimizer: str, dtype: torch.dtype = BF16, steps: int = STEPS, **options: Any) -> list[dict[str, Tensor]]:
    params = [torch.nn.Parameter(value) for value in start(dtype)]
    opt = OPTIMIZERS[optimizer](params, **options)
    go(opt, params, range(steps))
    return [kept(opt, p) for p in params]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for name, mine, theirs in zip(SHAPES, found, expected, strict=True):
        assert list(mine) == list(theirs), name
        for array, value in theirs.items():
            assert mine[array].dtype == value.dtype, f"{array} of {name}"
            assert mine[array].shape == value.shape, f"{array} of {name}"
            off = mine[array].ne(value).sum().item()
            assert not off, f"{array} of {name}: {off} of {value.numel()} differ"


def assert_lies_like(param: Any, state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name != "step":
            assert isinstance(value, DTensor) == isinstance(param, DTensor), name
            if isinstance(value, DTensor):
                assert (value.device_mesh, value.placements) == (param.device_mesh, param.placements), name
            last = param.shape[-1] // 32 if name.endswith("_exponents") else param.shape[-1]
            assert value.shape == (*param.shape[:-1], last), name


# --- ways of sharding -------------------------------------------------------------------------------------------------


def fsdp2(*mesh: int, **options: Any) -> Callable[[list[Tensor]], list[Any]]:
    def shard(wholes: list[Tensor]) -> list[Any]:
        return all_but_scalars_sharded([torch.nn.Parameter(v.clone()) for v in wholes], mesh_of(*mesh), **options)

    return shard


def placed(*mesh: int, **kinds: tuple[Any, ...]) -> Callable[[list[Tensor]], list[Any]]:
    """``kinds``: the placements of parameters by their name, with ``others`` for the rest."""

    def shard(wholes: list[Tensor]) -> list[Any]:
        names = (name.replace(" ", "_") for name in SHAPES)
        each = [kinds.get(name, kinds["others"]) for name in names]
        return [parameter(v, mesh_of(*mesh), *own) for v, own in zip(wholes, each, strict=True)]

    return shard


def over_tensor_parallel(experts: Any) -> Callable[[list[Tensor]], list[Any]]:
    """FSDP2 shards what tensor parallelism has left: rows in strides."""

    def shard(wholes: list[Tensor]) -> list[Any]:
        both = mesh_of(2, 2)
        first = {"matrix": S0, "smallest": S1, "one row": S1, "experts": experts, "vector": S0}
        params = [parameter(v, both["b"], first.get(name, R)) for name, v in zip(SHAPES, wholes, strict=True)]
        params = all_but_scalars_sharded(params, both["a"])
        assert {type(p).__name__ for param in params for p in param.placements} >= {"_StridedShard", "Shard"}
        return params

    return shard


LAYOUTS: dict[str, tuple[int, Callable[[list[Tensor]], list[Any]]]] = {
    "FSDP2": (2, fsdp2(2)),
    "tensor parallel": (2, placed(2, experts=(S1,), without_blocks=(S1,), uneven=(R,), others=(S1,))),
    "experts along their last dimension": (2, placed(2, experts=(S2,), vector=(R,), others=(S0,))),
    "FSDP2 along columns": (2, fsdp2(2, shard_placement_fn=lambda p: Shard(p.dim() - 1))),
    "FSDP2 on 3": (3, fsdp2(3)),
    "FSDP2 on 4": (4, fsdp2(4)),
    "HSDP": (4, fsdp2(2, 2)),
    "FSDP2 over tensor parallel": (4, over_tensor_parallel(S0)),
    "FSDP2 over tensor parallel of experts' rows": (4, over_tensor_parallel(S1)),
    "FSDP2 over tensor parallel of experts' columns": (4, over_tensor_parallel(S2)),
    "rows and columns": (4, placed(2, 2, experts=(S1, S2), others=(S0, S1))),
    "columns and columns": (4, placed(2, 2, experts=(S2, S1), one_row=(S1, S1), matrix=(S1, S1), others=(R, S1))),
}


def follow(layout: str, optimizer: str, storage: str, backend: str | None, dtype: torch.dtype = BF16) -> None:
    params = LAYOUTS[layout][1](start(dtype))
    opt = OPTIMIZERS[optimizer](params, storage=storage, backend=backend)
    go(opt, params, range(STEPS))
    for name, p in zip(SHAPES, params, strict=True):
        assert_lies_like(p, opt.state[p])
        assert ("exp_avg_codes" in opt.state[p]) == (storage == "8bit" and name in EIGHT_BITS), name
    assert_same([kept(opt, p) for p in params], alone(optimizer, dtype, storage=storage))


def world_of(layout: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue({2: "two", 3: "three", 4: "four"}[LAYOUTS[layout][0]])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits(layout, optimizer, storage, request):
    world_of(layout, request).run(follow, layout, optimizer, storage, None)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_eager(layout, optimizer, storage, request):
    world_of(layout, request).run(follow, layout, optimizer, storage, "eager")
