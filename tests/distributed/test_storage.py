"""Storage formats of sharded parameters: the bits of one process, for every way of sharding them.

Gradients are small multiples of a power of two, so that norms are exact in any order of summation: then clipping, too,
gives the same bits. AdamP's projections sum what is not exact, and have a test of their own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import fusedadam
from fusedadam import compat
from fusedadam.catalog import CATALOG
from fusedadam.contract.role_arrays import for_state_dict
from tests.distributed import reference
from tests.distributed.follow import assert_states_lie_like
from tests.distributed.parts import S0, S1, R, divided, divided_like, fully_shard, here, mesh_of, parameter, whole
from tests.distributed.reference import KINDS
from tests.distributed.test_same_results import all_but_scalars_sharded
from tests.distributed.world import NEEDS_FSDP2_ON_CPU, on
from tests.meaning.made_to_measure import gradient
from tests.support import BF16

S2 = Shard(2)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": functools.partial(fusedadam.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99)),
    "AdamP": functools.partial(fusedadam.AdamP, lr=1e-2, delta=0.0, max_grad_norm=1.0),  # it never projects
    "EmaAdamW": functools.partial(fusedadam.EmaAdamW, lr=1e-2, ema_decay=0.9, max_grad_norm=1.0),
    "BertAdam": functools.partial(fusedadam.BertAdam, lr=1e-2, warmup=0.3, t_total=20, max_grad_norm=0.5, clip="all"),
}
# Each with every format, in one layout or another
REST = {name: make for name, make in reference.REST.items() if name in CATALOG and name in reference.BIT_FOR_BIT}
assert REST
STORAGES = ("exact", "16bit", "8bit")
SHAPES = {
    "matrix": (64, 128),
    "smallest": (32, 128),  # a shard of it has fewer elements than 8 bits are for
    "uneven": (33, 128),
    "one row": (1, 4096),
    "experts": (4, 16, 64),
    "convolution": (33, 32, 3, 3),  # blocks run along all dimensions but the first
    "vector": (128,),
    "without blocks": (40, 120),
}
EIGHT_BITS = ("matrix", "smallest", "uneven", "one row", "experts", "convolution")
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


def kept(opt: Any, param: Any) -> dict[str, Tensor]:
    """The weight and all arrays of its states, whole, as a state dict has them: no process group gathers int16."""
    return {"param": whole(param), **{name: whole(v) for name, v in for_state_dict(opt.state[param]).items()}}


@functools.cache
def alone(optimizer: str, dtype: torch.dtype = BF16, **options: Any) -> list[dict[str, Tensor]]:
    params = [torch.nn.Parameter(value) for value in start(dtype)]
    opt = (OPTIMIZERS | REST)[optimizer](params, **options)
    go(opt, params, range(STEPS))
    return [kept(opt, p) for p in params]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        name = str(tuple(theirs["param"].shape))
        assert list(mine) == list(theirs), name
        for array, value in theirs.items():
            assert mine[array].dtype == value.dtype, f"{array} of {name}"
            assert mine[array].shape == value.shape, f"{array} of {name}"
            off = mine[array].ne(value).sum().item()
            assert not off, f"{array} of {name}: {off} of {value.numel()} differ"


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
    "tensor parallel": (2, placed(2, uneven=(R,), convolution=(S0,), others=(S1,))),
    "experts along their last dimension": (2, placed(2, experts=(S2,), vector=(R,), others=(S0,))),
    "FSDP2 along columns": (2, fsdp2(2, shard_placement_fn=lambda p: Shard((p.dim() - 1) % 3))),
    "FSDP2 on 3": (3, fsdp2(3)),
    "FSDP2 on 4": (4, fsdp2(4)),
    "HSDP": (4, fsdp2(2, 2)),
    "FSDP2 over tensor parallel": (4, over_tensor_parallel(S0)),
    "FSDP2 over tensor parallel of experts' rows": (4, over_tensor_parallel(S1)),
    "FSDP2 over tensor parallel of experts' columns": (4, over_tensor_parallel(S2)),
    "rows and columns": (4, placed(2, 2, experts=(S1, S2), convolution=(S0, R), others=(S0, S1))),
    "columns and columns": (
        4,
        placed(2, 2, experts=(S2, S1), one_row=(S1, S1), matrix=(S1, S1), convolution=(S0, S0), others=(R, S1)),
    ),
}


def follow(layout: str, optimizer: str, storage: str, backend: str | None, dtype: torch.dtype = BF16) -> None:
    params = LAYOUTS[layout][1](start(dtype))
    opt = (OPTIMIZERS | REST)[optimizer](params, storage=storage, backend=backend)
    go(opt, params, range(STEPS))
    for name, p in zip(SHAPES, params, strict=True):
        assert_states_lie_like(p, opt.state[p])
        has_codes = any(array.endswith(("_codes", "_steps")) for array in opt.state[p])
        assert has_codes == (storage == "8bit" and name in EIGHT_BITS), name
    assert_same([kept(opt, p) for p in params], alone(optimizer, dtype, storage=storage, backend=backend))


def world_of(layout: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue({2: "two", 3: "three", 4: "four"}[LAYOUTS[layout][0]])


EVERY = list(itertools.product(LAYOUTS, OPTIMIZERS, STORAGES))
# Quick are 8 bits of AdamW in each layout, and the other formats in every third. The others' kernels take long to
# compile: they are quick on the eager backend, which compiles nothing, one in each layout.
QUICK = [(layout, "AdamW", "8bit") for layout in LAYOUTS]
QUICK += [(layout, "AdamW", STORAGES[k % 2]) for k, layout in enumerate(LAYOUTS) if k % 3 == 0]
QUICK_EAGER = [(layout, [*OPTIMIZERS][1 + k % 3], STORAGES[2 - k // 3 % 2]) for k, layout in enumerate(LAYOUTS)]


def marked(quick: list[tuple[str, str, str]]) -> Any:
    cases = [pytest.param(*case, marks=[] if case in quick else pytest.mark.exhaustive) for case in EVERY]
    return pytest.mark.parametrize(("layout", "optimizer", "storage"), cases)


@marked(QUICK)
def test_same_bits(layout, optimizer, storage, request):
    world_of(layout, request).run(follow, layout, optimizer, storage, None)


@marked(QUICK_EAGER)
def test_same_bits_on_the_eager_backend(layout, optimizer, storage, request):
    world_of(layout, request).run(follow, layout, optimizer, storage, "eager")


@pytest.mark.parametrize(
    ("layout", "optimizer", "storage"),
    [
        (layout, *case)
        for layout, case in zip(itertools.cycle(LAYOUTS), itertools.product(REST, STORAGES), strict=False)
    ],
)
def test_same_bits_of_the_rest(layout, optimizer, storage, request):
    world_of(layout, request).run(follow, layout, optimizer, storage, "eager")


def follow_factored(layout: str, storage: str) -> None:
    """States by row and column have the same bits, since sums of squared gradients are exact. The update is divided by
    its own size, a sum that rounds differently."""
    params, alone = LAYOUTS[layout][1](start()), [torch.nn.Parameter(value) for value in start()]
    made = [fusedadam.Adafactor(own, lr=1e-2, storage=storage, backend="eager") for own in (params, alone)]
    for opt, own in zip(made, (params, alone), strict=True):
        go(opt, own, range(STEPS))
    for p, q in zip(params, alone, strict=True):
        assert_states_lie_like(p, made[0].state[p])
        mine, theirs = kept(made[0], p), kept(made[1], q)
        assert list(mine) == list(theirs)
        for name in mine.keys() & {"row_var", "col_var"}:
            assert mine[name].dtype == torch.float32
            assert torch.equal(mine[name], theirs[name]), f"{name} of {tuple(q.shape)}"
        torch.testing.assert_close(mine["param"], theirs["param"], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(("layout", "storage"), list(zip(LAYOUTS, itertools.cycle(STORAGES), strict=False)))
def test_states_by_row_and_column_of_weights_in_storage_formats(layout, storage, request):
    world_of(layout, request).run(follow_factored, layout, storage)


@pytest.mark.parametrize("storage", ["16bit", "8bit"])
def test_same_bits_of_the_states_of_float32_weights(four, storage):
    four.run(follow, "FSDP2 over tensor parallel", "AdamW", storage, "eager", torch.float32)


BACKENDS = pytest.mark.parametrize("backend", ["eager", pytest.param(None, marks=pytest.mark.exhaustive)])


@on("two")
@BACKENDS
@pytest.mark.parametrize(("layout", "exactly"), [("FSDP2", True), ("tensor parallel", False)])
def test_projections(layout, exactly, backend):
    """AdamP's sums over whole rows are exact enough for the same bits; where rows are cut, nearly all are the same."""
    params, alone = LAYOUTS[layout][1](start()), [torch.nn.Parameter(value) for value in start()]
    make = functools.partial(fusedadam.AdamP, lr=1e-2, weight_decay=0.1, nesterov=True, storage="8bit", backend=backend)
    opt, single, seen = make(params), make(alone), set()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for k, (p, q) in enumerate(zip(params, alone, strict=True)):
            q.grad = gradient(q.detach().double(), KINDS[(step + k) % 3], step, generator).to(q.dtype)
            p.grad = divided_like(q.grad, p)
        opt.step()
        single.step()
        assert list(opt.projections().values()) == list(single.projections().values())
        seen |= {*opt.projections().values()}
    assert seen == {"channel", "layer", "none"}
    mine, theirs = ([kept(o, p) for p in own] for o, own in ((opt, params), (single, alone)))
    if exactly:
        return assert_same(mine, theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert list(one) == list(other)
        off = sum(int((one[n].float() - other[n].float()).abs().gt(1e-6).sum()) for n in one)
        assert off <= 1e-3 * sum(value.numel() for value in one.values())


# --- what is refused --------------------------------------------------------------------------------------------------


def refuse_to_cut(shape: tuple[int, ...], *placements: Any) -> None:
    """When the optimizer is made, when a group is added, and when storage is changed: nothing is written."""
    param = parameter(torch.ones(shape, dtype=BF16), mesh_of(*[2] * len(placements)), *placements)
    param.grad = torch.ones_like(param)
    words = r"is sharded within blocks of 32 neighbors that share an exponent; shard it along dimension 0"
    with pytest.raises(RuntimeError, match=words):
        fusedadam.AdamW([param], storage="8bit")
    opt = fusedadam.AdamW([torch.nn.Parameter(torch.ones(3))], storage="8bit")
    with pytest.raises(RuntimeError, match=words):
        opt.add_param_group({"params": [param]})
    assert len(opt.param_groups) == 1
    opt = fusedadam.AdamW([param], storage="16bit", lr=0.5)
    opt.step()
    before, weight = dict(opt.state[param]), here(param).clone()
    opt.param_groups[0]["storage"] = "8bit"
    with pytest.raises(RuntimeError, match=words):
        opt.step()
    assert all(opt.state[param][name] is value for name, value in before.items())
    assert torch.equal(here(param), weight)
    opt.param_groups[0]["storage"] = "exact"
    opt.step()


def test_cut_blocks_are_refused(two, four):
    two.run(refuse_to_cut, (64, 96), S1)
    two.run(refuse_to_cut, (8, 16, 32), S2)
    four.run(refuse_to_cut, (64, 64), S1, S1)


# --- ZeRO, offload, gradients -----------------------------------------------------------------------------------------


@on("two")
@pytest.mark.parametrize(
    ("optimizer", "storage"),
    [
        pytest.param(o, s, marks=[pytest.mark.exhaustive] if s is not None and (i + k) % 3 else [])
        for i, o in enumerate(OPTIMIZERS)
        for k, s in enumerate((*STORAGES, None))
    ],
)
def test_zero(optimizer, storage):
    """Every parameter is whole on one process. What ZeRO saves, it gives back without asking the optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which takes long to import

    cls = OPTIMIZERS[optimizer].func
    options = {**OPTIMIZERS[optimizer].keywords, "storage": storage, "backend": "eager", "max_grad_norm": None}
    if optimizer == "BertAdam":
        options |= {"max_grad_norm": 0.5, "clip": "parameter"}
    dtype = torch.float32 if storage is None else BF16
    params, alone, others = ([torch.nn.Parameter(value) for value in start(dtype)] for _ in range(3))
    zero, single = ZeroRedundancyOptimizer(params, optimizer_class=cls, **options), cls(alone, **options)
    go(zero, params, range(2))
    go(single, alone, range(2))
    zero.consolidate_state_dict(to=0)
    box = [zero.state_dict() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0 and storage is None:
        saved, expected = box[0]["state"], single.state_dict()["state"]
        assert saved.keys() == expected.keys()
        for key, states in expected.items():
            torch.testing.assert_close(dict(saved[key]), dict(states), rtol=0, atol=0)
        cls(others, **options).load_state_dict(box[0])  # by one process
    dist.broadcast_object_list(box, src=0)
    zero = ZeroRedundancyOptimizer(params, optimizer_class=cls, **options)
    zero.load_state_dict(box[0])
    go(zero, params, range(2, STEPS))
    go(single, alone, range(2, STEPS))
    mine = [p for p in params if zero.optim.state.get(p)]
    assert 0 < len(mine) < len(params)
    assert all(torch.equal(p, q) for p, q in zip(params, alone, strict=True))
    for p in mine:
        q = alone[[p is other for other in params].index(True)]
        found, expected = kept(zero.optim, p), kept(single, q)
        assert {*found} == {*expected}
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@on("two")
def test_cpu_offload():
    params = fsdp2(2, offload_policy=CPUOffloadPolicy(pin_memory=False))(start())
    opt = OPTIMIZERS["AdamW"](params, storage="8bit")
    go(opt, params, range(STEPS))
    assert_same([kept(opt, p) for p in params], alone("AdamW", storage="8bit"))


@on("two")
@pytest.mark.parametrize("storage", ["16bit", "8bit"])
def test_gradients_that_are_sharded_otherwise(storage):
    """Gradients are sharded along another dimension, or not at all, and redistributed in every step."""
    params = LAYOUTS["FSDP2"][1](start())
    opt = OPTIMIZERS["AdamP"](params, storage=storage, backend="eager")
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = divided(values(step, p.shape).to(p.dtype), mesh_of(2), [(R, S1)[k % 2] if p.dim() > 1 else R])
        opt.step()
    assert_same([kept(opt, p) for p in params], alone("AdamP", storage=storage, backend="eager"))


@on("two")
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamP"])
def test_missing_gradients(optimizer):
    """A process without a gradient writes nothing; its elements take the noise of its own steps when it has one."""
    params = LAYOUTS["tensor parallel"][1](start())
    opt = OPTIMIZERS[optimizer](params, storage="8bit", backend="eager")
    go(opt, params, range(1))
    before = [here(p).clone() for p in params]
    for k, p in enumerate(params):
        p.grad = None if (dist.get_rank() + k) % 2 else divided_like(values(1, p.shape).to(p.dtype), p)
    opt.step()
    for k, p in enumerate(params):
        assert opt.state[p]["step"] == (1 if (dist.get_rank() + k) % 2 else 2)
        assert torch.equal(here(p), before[k]) == bool((dist.get_rank() + k) % 2)
    go(opt, params, range(2, STEPS))
    assert all(here(p).isfinite().all() for p in params)


# --- averages and float32 weights -------------------------------------------------------------------------------------


class Holder(torch.nn.Module):
    """Of the last three, some processes have shards without elements, which look alike."""

    def __init__(self, dtype: torch.dtype, more: float = 0.0) -> None:
        super().__init__()
        wholes = [*start(dtype), *(values(rows, (rows, 4096)).to(dtype) for rows in (2, 3, 3))]
        self.all = torch.nn.ParameterList(torch.nn.Parameter(v + more) for v in wholes)


@on("four")
@pytest.mark.parametrize("storage", STORAGES)
def test_float32_weights_and_averages(storage):
    """Set from float32, whole or sharded, trained, and read as float32: as in one process. Some shards are empty."""
    exact = Holder(torch.float32, 1 / 3).state_dict()
    ends, keys = [], []
    for how in ("alone", "whole", "sharded"):
        model = Holder(BF16)
        if how != "alone":
            fully_shard(model, mesh=mesh_of(dist.get_world_size()))
        given: Any = exact
        if how == "sharded":
            names = dict(model.named_parameters())
            given = {name: compat.distribute(v, names[name].device_mesh, [R]) for name, v in exact.items()}
        opt = OPTIMIZERS["EmaAdamW"](model.parameters(), storage=storage, backend="eager")
        opt.load_float32_state_dict(model, given)
        read = opt.float32_state_dict(model)
        assert {name: v.shape for name, v in read.items()} == {name: v.shape for name, v in exact.items()}
        if storage != "8bit":
            assert all(torch.equal(whole(v), exact[name]) for name, v in read.items())
        params = list(model.parameters())
        go(opt, params, range(STEPS))
        keys.append([f"{k} {name}" for k, p in enumerate(params) for name in opt.state[p]])
        averages = opt.ema_state_dict(model)
        with opt.ema_weights():
            inside = [whole(p).clone() for p in params]
        ends.append(
            [
                [kept(opt, p) for p in params],
                [whole(v) for v in (*opt.float32_state_dict(model).values(), *averages.values())],
                inside,
            ]
        )
    assert keys[1:] == keys[:1] * 2
    for mine in ends[1:]:
        assert_same(mine[0], ends[0][0])
        torch.testing.assert_close(mine[1:], ends[0][1:], rtol=0, atol=0)
    return keys


@on("two")
@NEEDS_FSDP2_ON_CPU
def test_step_in_backward():
    ends = []
    for early in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)).bfloat16()
        for module in (model[0], model):
            fully_shard(module, mesh=mesh_of(2))
        make = functools.partial(fusedadam.AdamW, lr=1e-2, storage="8bit")
        opt = fusedadam.step_in_backward(model, make) if early else make(model.parameters())
        for step in range(STEPS):
            opt.zero_grad()
            model(values(step, (4, 64)).bfloat16()).square().mean().backward()
            opt.step()
        ends.append([kept(opt, p) for p in model.parameters()])
    for mine, theirs in zip(*ends, strict=True):
        assert {*mine} == {*theirs}
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


@on("two")
def test_a_dtensor_of_channels_last_is_kept_exactly():
    """Its shards may be stored in any order: blocks would be declared along channels, and run along rows."""
    weight = values(99, (64, 32, 3, 3)).to(memory_format=torch.channels_last)
    param = torch.nn.Parameter(distribute_tensor(weight, mesh_of(2), [S0]))
    opt = fusedadam.AdamW([param], storage="8bit")
    alone = fusedadam.AdamW([single := torch.nn.Parameter(weight.clone())], storage="exact")
    for each, p in ((opt, param), (alone, single)):
        go(each, [p], range(2))
    assert "exp_avg" in opt.state[param]
    assert torch.equal(whole(param), single)
