"""Sharded parameters on one GPU: a mesh of one process (NCCL), and two processes that share the GPU (gloo)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedadam
from fusedadam import compat
from tests.distributed.world import World
from tests.gpu.test_gpu import OPTIMIZERS

pytestmark = pytest.mark.gpu
SHAPES = [(64, 48), (7,), (33, 5, 3), (1, 9), (300, 1000)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    store = f"file://{tmp_path_factory.mktemp('group')}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def values(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def divided(tensors, mesh, dim):
    from torch.distributed.tensor import Replicate, Shard

    placed = [[Shard(dim)] if t.dim() > dim else [Replicate()] for t in tensors]
    return [compat.distribute(t.cuda(), mesh, p) for t, p in zip(tensors, placed, strict=True)]


def train(optimizer, params, steps, place):
    for step in range(steps):
        for p, g in zip(params, place(values(1 + step)), strict=True):
            p.grad = g
        optimizer.step()


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()


def assert_same(one, other, ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(whole(p), whole(q))
        for name, state in one.state[p].items():
            assert torch.equal(whole(state), whole(other.state[q][name])), name


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_mesh_of_one_process_gives_the_bits_of_plain_tensors(mesh, make, dim, clipped):
    options = {"lr": 1e-2, "weight_decay": 0.1, **({"max_grad_norm": 0.5} if clipped else {})}
    ours = [nn.Parameter(t) for t in divided(values(0), mesh, dim)]
    plain = [nn.Parameter(t.cuda()) for t in values(0)]
    one, other = make(ours, **options), make(plain, **options)
    train(one, ours, 4, lambda tensors: divided(tensors, mesh, dim))
    train(other, plain, 4, lambda tensors: [t.cuda() for t in tensors])
    assert_same(one, other, ours, plain)
    if clipped and one.grad_norm is not None:
        assert torch.equal(one.grad_norm, other.grad_norm)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_grad_scaler_skips_steps_of_divided_parameters(mesh, make):
    ours = [nn.Parameter(t) for t in divided(values(0), mesh, 0)]
    plain = [nn.Parameter(t.cuda()) for t in values(0)]
    one, other = make(ours, lr=1e-2, capturable=True), make(plain, lr=1e-2)
    for step in range(6):
        for params, place in (
            (ours, lambda tensors: divided(tensors, mesh, 0)),
            (plain, lambda ts: [t.cuda() for t in ts]),
        ):
            for p, g in zip(params, place(values(1 + step)), strict=True):
                p.grad = g * 64
        if step % 2:
            ours[-1].grad.to_local()[-1, -1] = float("inf")
        scale, found_inf = torch.full((1,), 64.0, device="cuda"), torch.zeros(1, device="cuda")
        torch._amp_foreach_non_finite_check_and_unscale_(
            [p.grad for p in ours], found_inf, torch.ones(1, device="cuda")
        )
        one.grad_scale, one.found_inf = scale, found_inf
        one.step()
        if not step % 2:
            for p in plain:
                p.grad /= 64
            other.step()
    assert_same(one, other, ours, plain)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_on_divided_parameters_is_captured(mesh, make):
    ours = [nn.Parameter(t) for t in divided(values(0), mesh, 1)]
    plain = [nn.Parameter(t.cuda()) for t in values(0)]
    one, other = make(ours, lr=1e-2, capturable=True), make(plain, lr=1e-2)
    grads = divided(values(1), mesh, 1)
    for p, g in zip(ours, grads, strict=True):
        p.grad = g
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        one.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.step()
    train(other, plain, 1, lambda tensors: [t.cuda() for t in tensors])
    for step in range(1, 4):
        for g, new in zip(grads, values(1 + step), strict=True):
            g.to_local().copy_(new)
        graph.replay()
        for p, new in zip(plain, values(1 + step), strict=True):
            p.grad = new.cuda()
        other.step()
    assert_same(one, other, ours, plain)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_on_divided_parameters_does_not_wait(mesh, make):
    ours = [nn.Parameter(t) for t in divided(values(0), mesh, 1)]
    optimizer = make(ours)
    train(optimizer, ours, 2, lambda tensors: divided(tensors, mesh, 1))
    grads = divided(values(9), mesh, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for p, g in zip(ours, grads, strict=True):
            p.grad = g
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def two_processes(make, dim):
    """In each of the two: its part of every parameter after some steps."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (2,))
    params = [nn.Parameter(t) for t in divided(values(0), mesh, dim)]
    optimizer = getattr(fusedadam, make)(params, lr=1e-2, weight_decay=0.1)
    train(optimizer, params, 3, lambda tensors: divided(tensors, mesh, dim))
    projections = list(optimizer.projections().values()) if make == "AdamP" else None
    return [p.to_local().detach().cpu() for p in params], projections


@pytest.fixture(scope="module")
def pair():
    world = World(2)
    yield world
    world.end()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("make", ["AdamW", "AdamP", "BertAdam", "EmaAdamW"])
def test_two_processes_on_one_gpu_equal_one(pair, make, dim):
    parts = pair.run(two_processes, make, dim)
    plain = [nn.Parameter(t.cuda()) for t in values(0)]
    optimizer = getattr(fusedadam, make)(plain, lr=1e-2, weight_decay=0.1)
    train(optimizer, plain, 3, lambda tensors: [t.cuda() for t in tensors])
    if make == "AdamP":
        assert parts[0][1] == parts[1][1] == list(optimizer.projections().values())
    for k, p in enumerate(plain):
        first, second = parts[0][0][k], parts[1][0][k]
        joined = first if p.dim() <= dim else torch.cat([first, second], dim)
        tolerance = 0 if make in ("AdamW", "EmaAdamW") else 1e-6
        torch.testing.assert_close(joined, p.detach().cpu(), rtol=tolerance, atol=tolerance)
