"""Muon on sharded matrices: the bits of one process, for every placement, and what is sent for that.

test_same_results.py has the usual placements; these are the edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fusedadam
from fusedadam import OPTIONS, FusedOptimizer, RowValue, Scalar, State, Value, Values, checks, rule
from fusedadam.engine import products
from fusedadam.engine.exchange import operations, owners
from fusedadam.ops import orthogonalized, sqrt, sum_last
from fusedadam.rules import orthogonal
from fusedadam.rules.newton_schulz import DEFAULT
from fusedadam.tensors import matrices
from fusedadam.tensors.matrices import Matrices, matrices_of
from tests.distributed.collectives import Collectives
from tests.distributed.parts import S0, S1, R, divided_like, expected_here, here, mesh_of, parameter, whole
from tests.distributed.reference import STEPS
from tests.distributed.world import on
from tests.support import BF16, F16, F32, F64

S2, S3 = Shard(2), Shard(3)
SHAPES = {
    "matrices": [(12, 16), (16, 12), (12, 16), (7, 5), (1, 9), (12, 16)],
    "of 300": [(300, 280), (280, 300)],  # large ones are multiplied one by one
    "stacks and convolutions": [(4, 6, 8), (3, 5, 7), (6, 4, 3, 3), (2, 3, 1, 2, 2), (4, 6, 8)],
    "empty ones": [(0, 4), (5, 6), (4, 0), (2, 0, 3)],
    "beside vectors": [(9,), (6, 8), (), (8, 6)],
}


def draw(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def make(params: list[Any], **options: Any) -> Any:
    return fusedadam.Muon(params, **{"lr": 0.02, "use_muon": None, "backend": "eager", **options})


def assert_same(params: list[Any], alone: list[Any], label: Any = "") -> None:
    for k, (p, q) in enumerate(zip(params, alone, strict=True)):
        assert torch.equal(here(p), expected_here(q.detach(), p)), f"{label}: {k}, {tuple(q.shape)}"


def compare(
    shapes: Sequence[tuple[int, ...]], shard: Callable[[Tensor, int], Any], dtype: torch.dtype = F32, steps: int = 3,
    made: Callable[..., Any] = make, scale: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    """Trains sharded parameters and whole ones by the same gradients. Returns the optimizer of the sharded ones."""
    start = [v.to(dtype) for v in draw(shapes, 0)]
    params, alone = [shard(v, k) for k, v in enumerate(start)], [torch.nn.Parameter(v.clone()) for v in start]
    opt, single = made(params, **options), made(alone, **options)
    for step in range(steps):
        for p, q, g in zip(params, alone, draw(shapes, 1 + step), strict=True):
            q.grad = (g * scale).to(dtype)
            p.grad = divided_like(q.grad, p)
        opt.step()
        single.step()
    assert_same(params, alone, "weights")
    for p, q in zip(params, alone, strict=True):
        assert [*opt.state[p]] == [*single.state[q]]
        for name, value in single.state[q].items():
            assert torch.equal(here(opt.state[p][name]), expected_here(value, opt.state[p][name])), name
    return opt


def placed(mesh: Any, *placements: Any) -> Callable[[Tensor, int], Any]:
    """Each parameter has the next of the placements: one for each dimension of the mesh."""
    return lambda value, k: parameter(value, mesh, *placements[k % len(placements)])


@on("three")
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_on_three(shapes, placement):
    compare(shapes, placed(mesh_of(3), [placement]))


ON_FOUR = {
    "replicas": [[R, S0], [S1, R], [R, S1], [S0, R]],
    "rows and columns": [[S0, S1], [S1, S0], [S0, S0], [S1, S1]],
    "experts and rows": [[S0, S1], [S0, S2], [S2, S1], [R, S2]],
}


@on("four")
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("placements", ON_FOUR.values(), ids=ON_FOUR)
def test_two_dimensions_of_a_mesh(placements, dtype):
    compare([(5, 6, 7), (4, 8, 6), (6, 5, 9), (7, 9, 4), (1, 2, 3)], placed(mesh_of(2, 2), *placements), dtype)


@on("four")
def test_fsdp2_over_tensor_parallel():
    strided = [_StridedShard(0, split_factor=2), S0]

    def shard(value: Tensor, k: int) -> Any:
        placements = strided if k % 2 == 0 else [S0, S1]
        return parameter(value, mesh_of(2, 2), *placements)

    compare([(8, 6), (6, 8), (16, 3), (7, 5)], shard)


@on("four")
def test_several_meshes_and_a_mesh_without_all_processes():
    """Each matrix is shared out by the processes of its own mesh; half of them train one model, and half another."""
    both, cube, line = mesh_of(2, 2), mesh_of(2, 2, 1), mesh_of(4)
    where = [(both, S0, S1), (both["a"], S0), (both["b"], S1), (line, S1), (cube["b", "c"], S0, S1), (both, R, S0)]
    compare([(5, 6), (3, 4), (6, 7), (4, 4), (9, 5), (8, 3)], lambda v, k: parameter(v, *where[k]))


@on("four")
def test_one_shape_and_placement_on_meshes_of_two_sizes():
    line, pair = mesh_of(4), mesh_of(2, 2)["b"]
    compare([(16, 8)] * 3, lambda v, k: parameter(v, (line, pair, line)[k], S0))


@on("two")
def test_batches_do_not_depend_on_gradients_that_only_some_processes_have():
    """Experts are whole where they are, so a process without gradients for them takes no part in their step. The limit
    of memory grew with them, and processes exchanged batches of different sizes."""
    shapes = [(32, 16)] * 8 + [(8, 512, 128)]
    start, grads = draw(shapes, 0), draw(shapes, 1)
    params, alone = [parameter(v, mesh_of(2), S0) for v in start], [torch.nn.Parameter(v.clone()) for v in start]
    for k, (p, q, g) in enumerate(zip(params, alone, grads, strict=True)):
        q.grad = g
        p.grad = None if k == 8 and dist.get_rank() == 1 else divided_like(g, p)
    with mock.patch.object(products, "SMALLEST_LIMIT", 1 << 12):
        for params_of_one in (params, alone):
            make(params_of_one).step()
    assert_same(params[:8], alone[:8])


@on("four")
def test_a_mesh_in_another_order():
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [2, 0, 3, 1])
    compare([(9, 6), (6, 9), (12, 4)], placed(mesh, [S0], [S1]))


@on("two")
@pytest.mark.parametrize("narrow", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_every_dtype_of_products(narrow, scale):
    """GPUs multiply float16, whose operands are scaled by what the largest of all processes is; some CPUs float32."""
    with (
        mock.patch.object(orthogonal, "product_dtype", return_value=narrow),
        mock.patch.object(products, "product_dtype", return_value=narrow),
    ):
        compare([(12, 16), (7, 5), (3, 6, 8), (300, 280)], placed(mesh_of(2), [S0], [S1]), scale=scale, steps=2)


def test_narrowed_matrices_are_narrowed_no_further():
    """Nor if the largest value rounds up to a power of two, or is none, or tiny: the powers of two stay the same."""
    stack = draw([(200, 8, 9)], 0)[0] * torch.logspace(-44, 37, 200)[:, None, None]
    stack[:20, 0, 0] = 2.0 ** torch.arange(-10, 10) * (1 - 2.0**-13)
    stack[20], stack[21] = 0, 1e-45
    shifts = matrices.shifts_for(matrices.largest(stack))
    narrow, wide = matrices.narrowed(stack, shifts, F16), torch.empty_like(stack)
    assert narrow.isfinite().all()
    matrices.widen(narrow, shifts, wide)
    assert torch.equal(matrices.shifts_for(matrices.largest(wide)), shifts)
    assert torch.equal(matrices.narrowed(wide, shifts, F16), narrow)


@on("two")
def test_float16_keeps_the_bits_of_small_values():
    """Against float64: with a largest value that is a million times the others', which float16 holds only scaled."""
    value = draw([(40, 50)], 0)[0]
    value[0, 0] = 1e6
    ends = []
    for dtype in (F16, F64):
        stack = value.to(F64 if dtype == F64 else F32)[None].clone()
        with mock.patch.object(orthogonal, "product_dtype", return_value=dtype):
            orthogonal.orthogonalize(stack, DEFAULT)
        ends.append(stack.double())
    assert (ends[0] - ends[1]).norm() < 0.02 * ends[1].norm()


@on("two")
@pytest.mark.parametrize("storage", ["8bit", "16bit", "exact"])
def test_storage_formats(storage):
    shapes = [(64, 128), (33, 128), (4, 16, 64), (128,), (40, 120)]
    for placement in (S0, S1):
        compare(shapes, placed(mesh_of(2), [placement]), BF16, storage=storage)


@on("three")
@pytest.mark.parametrize("backend", ["eager", "numba"])
def test_in_small_batches(backend):
    """Batches of three matrices each, some of them on their way while another is multiplied."""
    with mock.patch.object(products, "SMALLEST_LIMIT", 1000), mock.patch.object(products, "LARGEST_SHARE", 0):
        opt = compare([(12, 16)] * 7 + [(6, 8)] * 3, placed(mesh_of(3), [S0]), backend=backend)
    batches = opt._stepper.last_plan.launches.batches
    assert [one.exchange.owner_of.tolist() for one in batches] == [[[0], [1], [2]]] * 2 + [[[0]], [[1], [1], [2]]]


@on("two")
def test_groups_with_other_methods_and_adamw():
    groups = [{"ns_steps": 3}, {"nesterov": False, "lr": 0.1}, {"use_muon": False, "lr": 1e-3}, {"momentum": 0.5}]

    def made(params: list[Any]) -> Any:
        own = [{"params": params[k::4], **group} for k, group in enumerate(groups)]
        return make(own, weight_decay=0.1, max_grad_norm=1e9)

    compare([(12, 16), (12, 16), (7, 5), (12, 16)] * 2, placed(mesh_of(2), [S0], [S1]), made=made)


@on("two")
def test_tritons_kernels():
    """Interpreted. The same bits for every placement; those of one process but for what is rounded on its way, in
    float16."""
    pytest.importorskip("triton")
    start = draw([(12, 16), (20, 8), (5, 7), (12, 16)], 0)
    ways = [[parameter(v, mesh_of(2), way) for v in start] for way in (S0, S1)]
    ways.append([torch.nn.Parameter(v.clone()) for v in start])
    for params in ways:
        opt = make(params, backend="triton")
        for step in range(2):
            for p, g in zip(params, draw([v.shape for v in start], 1 + step), strict=True):
                p.grad = divided_like(g, p)
            opt.step()
    for value, p, q, alone in zip(start, *ways, strict=True):
        assert torch.equal(whole(p), whole(q))
        assert (whole(p) - whole(alone)).norm() < 0.02 * (whole(alone) - value).norm()


@on("one")
def test_a_mesh_of_one_process_sends_nothing():
    compare([(6, 8), (3, 4, 5)], placed(mesh_of(1), [S0], [S1]))
    collectives, sent = counted([(6, 8), (3, 4, 5)], mesh_of(1), [S0])
    assert collectives == []
    assert set(sent) == {None}


# --- what is not everywhere -------------------------------------------------------------------------------------------

MISSING = {
    "one on one rank": {1: [0]},
    "several on several ranks": {0: [1, 2], 2: [0, 2]},
    "all on the first rank": {0: [0, 1, 2, 3]},
    "all on the last rank": {2: [0, 1, 2, 3]},
    "all but one of all ranks": {0: [0, 1, 2, 3], 1: [0, 1, 3], 2: [0, 1, 2, 3]},
    "all on all": {rank: [0, 1, 2, 3] for rank in range(3)},
}


@on("three")
@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_gradients_that_are_missing_on_some(missing, placement, backend):
    """A process without a gradient sends zeros, and leaves its part as it is. The others have the bits of one process
    whose gradients are zero where they are missing."""
    shapes, rank = [(6, 9), (9, 6), (6, 9), (3, 4, 6)], dist.get_rank()
    start = draw(shapes, 0)
    params = [parameter(v, mesh_of(3), placement) for v in start]
    alone = [torch.nn.Parameter(v.clone()) for v in start]
    opt, single = make(params, backend=backend), make(alone, backend=backend)
    for step in range(STEPS):
        for k, (p, q, g) in enumerate(zip(params, alone, draw(shapes, 1 + step), strict=True)):
            silent = [r for r, own in missing.items() if k in own]
            for r, piece in enumerate(g.chunk(3, placement.dim)):
                piece.mul_(r not in silent)
            q.grad = g
            p.grad = None if rank in silent else divided_like(g, p)
        opt.step()
        single.step()
    for k, (p, q) in enumerate(zip(params, alone, strict=True)):
        if k in missing.get(rank, ()):
            assert torch.equal(here(p), expected_here(start[k], p)), k
            assert not opt.state.get(p), k
        else:
            assert torch.equal(here(p), expected_here(q.detach(), p)), k
    for p, value in zip(params, start, strict=True):  # and all together again
        p.grad = divided_like(value, p)
    opt.step()
    assert all(here(p).isfinite().all() for p in params)


@on("two")
def test_frozen_parameters_and_a_process_that_makes_its_plan_alone():
    """Frozen matrices still travel. Of the others, one process at a time lacks a gradient, and makes another plan."""
    shapes, rank = [(6, 8), (8, 6), (6, 8)], dist.get_rank()
    params = [parameter(v, mesh_of(2), S0) for v in draw(shapes, 0)]
    params[1].requires_grad_(False)
    frozen, opt = here(params[1]).clone(), make(params)
    for step in range(6):
        for k, p in enumerate(params):
            has_gradient = p.requires_grad and not (k == 0 and step % 2 == rank)
            p.grad = divided_like(torch.ones(p.shape), p) if has_gradient else None
        opt.step()
        others = torch.full((3,), 10.0**step)  # of the training itself: it meets its own kind
        dist.all_reduce(others)
        assert others[0] == 2 * 10.0**step
    assert torch.equal(here(params[1]), frozen)
    assert [opt.state[p].get("step", torch.tensor(0.0)).item() for p in params] == [3, 0, 6]


@on("two")
def test_groups_that_are_added_later():
    start = draw([(6, 8), (8, 6), (5, 5)], 0)
    params, alone = [parameter(v, mesh_of(2), S0) for v in start], [torch.nn.Parameter(v.clone()) for v in start]
    opts = [make(own[:1]) for own in (params, alone)]
    for step in range(4):
        if step == 2:
            for opt, own in zip(opts, (params, alone), strict=True):
                opt.add_param_group({"params": own[1:], "use_muon": True, "lr": 0.05})
        for p, q, g in zip(params, alone, draw([v.shape for v in start], step), strict=True):
            p.grad, q.grad = divided_like(g, p), g
        for opt in opts:
            opt.step()
    assert_same(params, alone)


@on("two")
def test_nan_stays_in_its_own_matrix():
    params = [parameter(torch.ones(8, 8), mesh_of(2), S0) for _ in range(3)]
    opt = make(params, weight_decay=0)
    for p, value in zip(params, (0.0, float("nan"), 1.0), strict=True):
        p.grad = divided_like(torch.full((8, 8), 1.0), p)
        here(p.grad)[0, 0] = value if dist.get_rank() == 1 else 1.0
    opt.step()
    assert [bool(here(p).isnan().all()) for p in params] == [False, True, False]
    assert all(here(params[k]).isfinite().all() for k in (0, 2))


@on("two")
def test_skip_nonfinite_on_all():
    params = [parameter(torch.ones(8, 8), mesh_of(2), S0) for _ in range(2)]
    opt = make(params, skip_nonfinite=True)
    for step in range(3):
        for p in params:
            p.grad = divided_like(draw([(8, 8)], step)[0], p)
        if step == 1 and dist.get_rank() == 1:
            here(params[1].grad)[0, 0] = float("inf")
        before = [here(p).clone() for p in params]
        opt.step()
        assert all(torch.equal(here(p), b) for p, b in zip(params, before, strict=True)) == (step == 1)


# --- rules of other people --------------------------------------------------------------------------------------------


@rule(scalars=lambda lr, beta, weight_decay: {"lr": lr, "beta": beta, "betac": 1 - beta})
def row_muon(
    param: Value, grad: Value, row: RowValue, *, lr: Scalar, beta: Scalar, betac: Scalar, last_length: Scalar,
) -> Values:  # fmt: skip
    update = orthogonalized(grad)
    row = beta * row + betac * sum_last(update * update) / last_length
    param = param - 0.2 * lr * update / (sqrt(row) + 1e-8)
    return param, row


class RowMuon(FusedOptimizer):
    rule = row_muon
    states = {"row": State(signed=False)}
    options = OPTIONS | {"beta": checks.fraction}

    def __init__(self, params, lr=1e-2, beta=0.5, weight_decay=0.0, **common):
        super().__init__(params, lr=lr, beta=beta, weight_decay=weight_decay, **common)


@on("two")
@pytest.mark.parametrize("backend", ["eager", "numba"])
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
def test_a_rule_that_sums_what_it_has_orthogonalized(placement, backend):
    """In batches, so that each reduction has to come after its own products. Rows that are sharded are summed in
    another order, so these are as close as rounding."""
    start, options = draw([(12, 16)] * 4 + [(5, 6)], 0), {"backend": backend}
    params, alone = [parameter(v, mesh_of(2), placement) for v in start], [torch.nn.Parameter(v.clone()) for v in start]
    with mock.patch.object(products, "SMALLEST_LIMIT", 1000), mock.patch.object(products, "LARGEST_SHARE", 0):
        opts = [RowMuon(params, **options), RowMuon(alone, **options)]
        for step in range(3):
            for k, (p, q, g) in enumerate(zip(params, alone, draw([v.shape for v in start], step), strict=True)):
                q.grad, p.grad = g, divided_like(g, p)
                if k == 1 and step == 2:  # on one process alone: the other one waits for its row
                    q.grad.chunk(2, placement.dim)[1].zero_()
                    p.grad = divided_like(q.grad, p) if dist.get_rank() == 0 else None
            for opt in opts:
                opt.step()
    for k, (p, q) in enumerate(zip(params, alone, strict=True)):
        if placement == S1 or k != 1 or dist.get_rank() == 0:
            torch.testing.assert_close(here(p), expected_here(q.detach(), p), rtol=1e-5, atol=1e-7)


# --- what is sent -----------------------------------------------------------------------------------------------------


def counted(shapes: Sequence[tuple[int, ...]], mesh: Any, placements: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The collectives of a step, and the bytes that each process sends to others in it, both ways, by batch."""
    params = [parameter(v, mesh, *placements) for v in draw(shapes, 0)]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = make(params)
    opt.step()
    with Collectives() as seen:
        opt.step()
    exchanges = [batch.exchange for batch in opt._stepper.last_plan.launches.batches]
    return seen.seen, [None if one is None else one.bytes_sent() for one in exchanges]


@on("two")
def test_nothing_is_sent_for_experts_and_plain_tensors():
    for shapes, placements in (([(4, 6, 8), (5, 3, 3)], [S0]), ([(6, 8)], [R])):
        collectives, sent = counted(shapes, mesh_of(2), placements)
        assert collectives == []
        assert set(sent) == {None}


def sent_to_others(shapes: Sequence[tuple[int, ...]], mesh: tuple[int, ...], placements: Sequence[Any]) -> Any:
    """The names of a step's collectives; what this process hands to each of the others, by the plan; and what it has
    in fact handed over."""
    own, real = [0] * dist.get_world_size(), dist.all_to_all_single

    def count(output: Tensor, source: Tensor, received: list[int], sent: list[int], *more: Any, **options: Any) -> Any:
        for rank, runs in enumerate(sent):
            own[rank] += runs * source[:1].numel() * source.element_size()
        return real(output, source, received, sent, *more, **options)

    with mock.patch.object(dist, "all_to_all_single", count):
        collectives, sent = counted(shapes, mesh_of(*mesh), placements)
    own[dist.get_rank()] = 0
    return [one.name for one in collectives], sum(sent).tolist(), sum(own) // 2  # of two steps


def bytes_of(world: Any, shapes: Sequence[tuple[int, ...]], mesh: tuple[int, ...], placements: Sequence[Any]) -> int:
    """Sent by all processes in one step."""
    answers = world.run(sent_to_others, shapes, mesh, placements)
    for names, planned, handed in answers:
        assert names == ["alltoall_base_"] * 2 * len({*shapes})  # one each way for a batch of a shape
        assert planned == [handed for *_, handed in answers]
    return sum(handed for *_, handed in answers)


WIDTH = orthogonal.product_dtype(torch.zeros(1, 1, 1)).itemsize


@pytest.mark.parametrize("placement", [S0, S1], ids=str)
def test_bytes_of_fsdp2(four, placement):
    """On average twice the bytes of a process's share, without what it keeps."""
    shapes = [(64, 48)] * 6 + [(48, 64)] * 5 + [(32, 20)]
    every = sum(a * b for a, b in shapes)
    assert bytes_of(four, shapes, (4,), [placement]) == 2 * WIDTH * every * (1 - 1 / 4)


def test_bytes_of_uneven_shards(three):
    """Somewhat more or less: it depends on how much of its own matrices each process has."""
    shapes = [(7, 5), (2, 3), (10, 4)] * 3
    every = sum(a * b for a, b in shapes)
    assert bytes_of(three, shapes, (3,), [S0]) < 1.1 * 2 * WIDTH * every * (1 - 1 / 3)


def test_bytes_of_replicas(four):
    """Replicas share the work: each of two sends what it owns to all, and gets its parts from its own shards alone."""
    every = 64 * 48 * 8
    # forth: half of each matrix; back: half to the shard beside the owner, and all to both of the other replica
    assert bytes_of(four, [(64, 48)] * 8, (2, 2), [R, S0]) == WIDTH * every * (1 / 2 + 1 / 2 + 1)


LLAMA_7B = 32 * ([(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)])
LLAMA_70B = 80 * ([(8192, 8192)] * 2 + [(1024, 8192)] * 2 + [(28672, 8192)] * 2 + [(8192, 28672)])


@pytest.mark.parametrize("processes", [8, 64])
@pytest.mark.parametrize("shapes", [LLAMA_7B, LLAMA_70B], ids=["7B", "70B"])
def test_owners_are_balanced_by_operations(shapes, processes):
    costs = [operations(matrices_of(shape), 5) for shape in shapes]
    loads = [0] * processes
    for cost, owner in zip(costs, owners(costs, processes), strict=True):
        loads[owner] += cost
    even = sum(costs) / processes
    print(f"{max(loads) / even:.3f} times an even share; the largest matrix is {max(costs) / even:.3f}")
    assert max(loads) <= max(1.1 * even, *costs)


def test_operations_of_a_matrix():
    """Those of the plain iteration, whichever side is longer, and never none: a matrix has to be sent, too."""
    assert operations(Matrices(1, 3, 5), 2) == operations(Matrices(1, 5, 3), 2) == 2 * (2 * 9 * 5 + 27) + 15
    assert operations(Matrices(7, 3, 5), 0) == 15
