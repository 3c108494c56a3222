"""Edge cases of shapes and layouts: uneven and empty shards, dimensions smaller than the world, several meshes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fusedadam
from fusedadam import compat
from tests.distributed.follow import follow
from tests.distributed.parts import S0, S1, R, digest, fitting, from_part, here, mesh_of, parameter, part_of
from tests.distributed.reference import make, one_process
from tests.distributed.world import on
from tests.support import BF16, F32, F64

OPTIMIZERS = ("AdamW", "AdamP", "AdamP clipped", "BertAdam", "EmaAdamW clipped")
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS)

SHAPES = {
    "uneven": [(7, 3), (5, 4), (4,), (10, 1), (2, 7, 2)],
    "smaller than the world": [(2, 3), (1, 5), (2,), (1,), (1, 1), (2, 2)],
    "an empty one first": [(0, 4), (5, 6), (3,)],
    "an empty one in the middle": [(5, 6), (3, 0), (3, 5)],
    "an empty one last": [(5, 6), (3, 5), (0,)],
    "nothing but empty ones": [(0, 4), (0,), (2, 0)],
    "scalars": [(), (5, 6), (), (4,)],
    "convolutions": [(4, 3, 2, 2), (2, 5, 3), (3, 2, 1, 2, 2)],
}


@on("three")
@EVERY
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_on_three(shapes, placement, optimizer):
    run = one_process(optimizer, shapes)
    follow(run, optimizer, [parameter(v, mesh_of(3), placement) for v in run.start])


def channels_last(part: Tensor) -> Tensor:
    return part.contiguous(memory_format=torch.channels_last)


def transposed(part: Tensor) -> Tensor:
    return part.transpose(0, 1).contiguous().transpose(0, 1)


def with_gaps(part: Tensor) -> Tensor:
    return torch.stack([part, part], dim=-1)[..., 0]


LAYS = {f.__name__: ((4, 6, 2, 3), f) for f in (channels_last, transposed, with_gaps)}


@on("two")
@EVERY
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("name", LAYS)
def test_parts_that_are_not_contiguous(name, placement, optimizer):
    """The parameter lies so, the next one's gradient and state do not: and the other way around."""
    shape, lay = LAYS[name]
    run = one_process(optimizer, [shape, shape])
    params = []
    for k, value in enumerate(run.start):
        whole = parameter(value, mesh_of(2), placement)
        part = lay(here(whole)) if k == 0 else here(whole)
        params.append(torch.nn.Parameter(from_part(part, shape, mesh_of(2), [placement])))
    assert not here(params[0]).is_contiguous()
    follow(run, optimizer, params, lay=lambda k, part: part if k == 0 else lay(part))


@on("two")
@EVERY
def test_plain_tensors_beside_divided_ones(optimizer):
    """Plain tensors, which every process has, between those that are divided."""
    run = one_process(optimizer, [(3, 4), (5, 6), (7,), (2, 3), (4, 4)])
    mesh = mesh_of(2)
    params = [
        torch.nn.Parameter(v.clone()) if k % 2 == 0 else parameter(v, mesh, S0 if k == 1 else S1)
        for k, v in enumerate(run.start)
    ]
    follow(run, optimizer, params)


@on("four")
@EVERY
def test_several_meshes_in_one_optimizer(optimizer):
    """Over both dimensions of a mesh, over each of them, and over a mesh of one dimension of all processes."""
    run = one_process(optimizer, [(5, 6), (3, 4), (7,), (2, 3), (4, 4), (6, 5), (3, 3)])
    both, all_four = mesh_of(2, 2), mesh_of(4)
    where = [(both, S0, S1), (both["a"], S0), (both["b"], S0), (both["b"], S1), (all_four, S1), (both, R, S0)]
    where.append((all_four, S0))
    follow(run, optimizer, [parameter(v, *own) for v, own in zip(run.start, where, strict=True)])


@on("four")
@EVERY
def test_a_mesh_that_does_not_cover_the_world(optimizer):
    """Two dimensions of three, so that half of the processes train one model and half another, or the same."""
    run = one_process(optimizer, [(5, 6), (3, 4), (7,), (2, 3)])
    for cube, names in (((2, 2, 1), ("b", "c")), ((2, 1, 2), ("b", "c")), ((2, 2, 1), ("a", "c"))):
        mesh = mesh_of(*cube)[names]
        assert mesh.size() == 2
        placements = [(S0, S1), (S1, S0), (S0, R), (S1, S1)]
        follow(run, optimizer, [parameter(v, mesh, *own) for v, own in zip(run.start, placements, strict=True)])


@on("four")
@EVERY
def test_processes_outside_a_mesh(optimizer):
    """A mesh of the first two processes: the others have no part of it, and nothing to do."""
    mesh = DeviceMesh("cpu", [0, 1])
    run = one_process(optimizer, [(5, 6), (3, 4), (7,)])
    if mesh.get_coordinate() is not None:
        follow(run, optimizer, [parameter(v, mesh, S0) for v in run.start])
        return
    params = []
    for value in run.start:
        nothing = DTensor.from_local(
            value.new_empty(0), mesh, [S0], run_check=False, shape=value.shape, stride=value.stride()
        )
        params.append(torch.nn.Parameter(nothing))
    opt = make(optimizer, params)
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step()


@on("three")
@EVERY
def test_gradients_that_are_missing_on_all(optimizer):
    """Which parameters have a gradient changes from step to step, on all processes alike."""
    run = one_process(optimizer, [(5, 6), (3, 4), (7,), (2, 3)], has_gradient=lambda step, k: (step + k) % 3 != 0)
    follow(run, optimizer, [parameter(v, mesh_of(3), S0 if k % 2 else S1) for k, v in enumerate(run.start)])


@on("two")
@EVERY
def test_frozen_parameters(optimizer):
    run = one_process(optimizer, [(5, 6), (3, 4), (7,), (2, 3)], has_gradient=lambda step, k: k not in (1, 2))
    params = [parameter(v, mesh_of(2), S0) for v in run.start]
    for k in (1, 2):
        params[k].requires_grad_(False)
    opt = follow(run, optimizer, params)
    assert not any(params[k] in opt.state for k in (1, 2))


@on("two")
@pytest.mark.parametrize(
    "optimizer", ["AdamW", "AdamP clipped", "BertAdam by group", "BertAdam over all", "EmaAdamW clipped"]
)
def test_several_dtypes_in_one_optimizer(optimizer):
    run = one_process(optimizer, [(5, 6), (3, 4), (7,), (2, 3), (4, 4), (6, 5)], dtypes=(F32, F64, BF16))
    params = [parameter(v, mesh_of(2), (S0, S1)[k // 3]) for k, v in enumerate(run.start)]
    follow(run, optimizer, params)


@on("four")
@EVERY
def test_the_eager_backend(optimizer):
    """The other backend, to the bit: it has ways of its own to keep rows and sums."""
    run = one_process(optimizer, [(5, 6), (3, 4), (7,), (2, 3, 2), (1, 4), (2, 9000)])
    ends = []
    for backend in ("numba", "eager"):
        where = [(S0, S1), (S1, S0), (R, S0), (S1, S1), (S0, R), (S1, R)]
        params = [parameter(v, mesh_of(2, 2), *own) for v, own in zip(run.start, where, strict=True)]
        opt = follow(run, optimizer, params, backend=backend)
        ends.append(digest(t for p in params for t in (p, *opt.state[p].values())))
    assert ends[0] == ends[1]


@on("two")
def test_states_are_where_their_parameters_are():
    """A mesh of another device than its parameters', as with CPU offload; a made-up one, so that no GPU is needed."""
    mesh = init_device_mesh("cpu", (2,))
    param = parameter(torch.randn(5, 3), mesh, S0)
    param.grad = torch.zeros_like(param)
    mesh._device_type = "meta"
    optimizer = make("EmaAdamW", [param])
    optimizer.step()
    states = {name: state for name, state in optimizer.state[param].items() if name != "step"}
    assert [*states] == ["exp_avg", "exp_avg_sq", "ema_params"]
    for state in states.values():
        assert (state.device.type, here(state).device.type, state.placements) == ("cpu", "cpu", (S0,))


def dealt_out() -> Any:
    """As experts are that FSDP2 divides after expert parallel has (both along rows), and tensor parallel by columns."""
    mesh, placements = mesh_of(2, 2, 1), [_StridedShard(0, split_factor=2), S0, S1]
    param = torch.nn.Parameter(from_part(torch.ones(2, 4), (8, 4), mesh, placements))
    param.grad = from_part(torch.ones(2, 4), (8, 4), mesh, placements)
    return param


@on("four")
def test_rows_dealt_out_in_strides_and_divided_are_refused():
    with pytest.raises(
        RuntimeError, match="rows are sharded, and also dealt out in strides; shard it along dimension 0"
    ):
        fusedadam.AdamP([dealt_out()]).step()


@on("four")
@pytest.mark.parametrize("optimizer", ["AdamW", "EmaAdamW clipped", "BertAdam"])
def test_rules_without_rows_take_any_strides(optimizer):
    param, alone = dealt_out(), torch.nn.Parameter(torch.ones(8, 4))
    alone.grad = torch.ones(8, 4)
    for one in (param, alone):
        make(optimizer, [one]).step()
    torch.testing.assert_close(here(param), alone.detach()[:2])


@on("two")
def test_parameters_that_are_still_to_be_added_up_are_refused():
    param = torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh_of(2), [Partial()], run_check=False))
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"Partial placement, which has no value yet; .redistribute\(\) it"):
        fusedadam.AdamW([param]).step()


@on("four")
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamP", "AdamP clipped", "BertAdam over all", "Muon"])
@pytest.mark.parametrize("seed", range(3))
def test_any_shapes_and_placements(seed, optimizer):
    """Shapes, placements and missing gradients as they come; the same on all processes."""
    choose = random.Random(seed)
    shapes = [tuple(choose.choice((0, 1, 2, 3, 5, 8)) for _ in range(choose.randint(0, 4))) for _ in range(12)]
    run = one_process(optimizer, shapes, has_gradient=lambda step, k: (step * 7 + k + seed) % 5 != 0)
    meshes = [mesh_of(4), mesh_of(2, 2), mesh_of(2, 2)["a"], mesh_of(2, 2, 1), mesh_of(2, 2, 1)["b", "c"]]
    params = []
    for value in run.start:
        mesh = choose.choice(meshes)
        placements = [choose.choice((R, *map(Shard, range(max(1, value.dim()))))) for _ in range(mesh.ndim)]
        params.append(parameter(value, mesh, *placements))
    follow(run, optimizer, params)


@on("four")
def test_parts_by_hand_are_torchs():
    """What all of these tests go by."""
    for shape in ((7, 5), (1, 3), (4, 2, 3), (0, 4), (9,)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for own in itertools.product((R, S0, S1), repeat=2):
            placements = [fitting(p, whole.dim()) for p in own]
            theirs = compat.distribute(whole, mesh_of(2, 2), placements)
            assert torch.equal(part_of(whole, mesh_of(2, 2), placements), here(theirs)), (shape, own)
