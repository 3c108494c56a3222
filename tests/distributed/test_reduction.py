"""How many collectives a step runs, and how many bytes each process contributes: counted, not estimated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

import fusedadam
from fusedadam import compat
from tests.distributed.collectives import Collectives
from tests.distributed.parts import S0, S1, R, divided_like, mesh_of, parameter
from tests.distributed.reference import ELEMENTWISE, OPTIMIZERS, make
from tests.distributed.world import on
from tests.meaning.made_to_measure import values

NUMBER = 8  # bytes: sums travel in float64
SHAPES = [(6, 20), (5,), (4, 3, 2), (7, 3), (9,), (1, 6)]  # of the last, some processes have nothing
ROWS = [6, 0, 4, 7, 0, 1]  # of the matrices
MATRICES, ALL = 4, 6


def each_matrix(whole_rows: int, by_row: int) -> dict[str, int]:
    """Numbers that travel for matrices: so many a matrix where rows are whole, so many a row where they are divided.
    One more each says on how many processes there is a gradient."""
    return {"S(0)": MATRICES * (whole_rows + 1), "S(1)": sum(ROWS) * by_row + MATRICES}


CLIP = {"S(0)": ALL * 2, "S(1)": ALL * 2}
# a row's products pp, gg, pg, pu; where rows are whole, the sums of these and how many rows are too radial
PROJECT = each_matrix(5, 4)
# of the gradients first, and each says once whether it is there; the sum over a divided row is by row
CLIP_BY_ROWS = {"S(0)": ALL * 2, "S(1)": sum(ROWS) + MATRICES + (ALL - MATRICES) * 2}
PROJECT_AFTER = {where: numbers - MATRICES for where, numbers in PROJECT.items()}
ROUNDS: dict[str, list[dict[str, int]]] = {
    **{name: [] for name in ELEMENTWISE},
    "AdamP": [PROJECT],
    "AdamP clipped": [CLIP_BY_ROWS, PROJECT_AFTER],
    "BertAdam": [CLIP],
    "BertAdam by group": [CLIP],
    "BertAdam over all": [CLIP],
    "EmaAdamW clipped": [CLIP],
}


def parameters(mesh: Any, *placements: Any) -> list[Any]:
    params = [parameter(v.float(), mesh, *placements) for v in values(SHAPES)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


def count(optimizer: str, shape: tuple[int, ...], placements: list[Any]) -> tuple[list[Any], list[int]]:
    """Of each of three steps, which must be the same: the second and third have plans made before."""
    params = parameters(mesh_of(*shape), *placements)
    opt, every = make(optimizer, params), []
    for _ in range(3):
        with Collectives() as counted:
            opt.step()
        every.append(counted.seen)
    assert every[0] == every[1] == every[2]
    with Collectives() as counted:  # these are known by then
        opt.grad_norm  # noqa: B018
        if hasattr(opt, "projections"):
            opt.projections()
    assert counted.seen == []
    return every[0], [one.bytes for one in opt._stepper.last_plan.launches.reductions]


def expect(answers: list[Any], optimizer: str, where: str) -> None:
    numbers = [NUMBER * one[where] for one in ROUNDS[optimizer]]
    for seen, said in answers:
        assert seen == [("allreduce_", one) for one in numbers]
        assert said == numbers


EVERY = pytest.mark.parametrize("optimizer", ROUNDS)


@EVERY
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
def test_one_all_reduce_a_round(two, placement, optimizer):
    expect(two.run(count, optimizer, (2,), [placement]), optimizer, str(placement))


@EVERY
def test_one_all_reduce_a_round_on_three(three, optimizer):
    """Bytes do not grow with the world."""
    expect(three.run(count, optimizer, (3,), [S1]), optimizer, "S(1)")


@EVERY
@pytest.mark.parametrize("placements", [[R, S0], [S0, S0], [S0, S1]], ids=str)
def test_one_all_reduce_a_round_over_two_dimensions(four, placements, optimizer):
    """Not one for each of them."""
    expect(four.run(count, optimizer, (2, 2), placements), optimizer, str(max(placements, key=str)))


@EVERY
def test_none_where_nothing_is_divided(two, optimizer):
    for seen, said in two.run(count, optimizer, (2,), [R]):
        assert seen == said == []


@on("two")
@EVERY
def test_all_parameters_of_a_mesh_together(optimizer):
    """Of several placements, dtypes and groups, and plain tensors: still one mesh."""
    mesh, params = mesh_of(2), []
    for k, shape in enumerate([(4, 3), (5,), (6, 2), (3, 3), (7,), (4, 4), (2, 2), (3,)]):
        value = torch.ones(shape, dtype=(torch.float32, torch.float64, torch.bfloat16)[k % 3])
        params.append(parameter(value, mesh, (S0, S1, R)[k % 3 if k < 6 else k % 2]))
    params.append(torch.nn.Parameter(torch.ones(3, 3)))
    for p in params:
        p.grad = torch.ones_like(p)
    opt = OPTIMIZERS[optimizer](params)
    with Collectives() as counted:
        opt.step()
    assert [c.bytes for c in counted.seen] == [one.bytes for one in opt._stepper.last_plan.launches.reductions]
    assert [c.name for c in counted.seen] == ["allreduce_"] * len(ROUNDS[optimizer])


@on("four")
@EVERY
def test_one_for_each_mesh(optimizer):
    both = mesh_of(2, 2)
    params = [parameter(v.float(), mesh, S0) for v in values([(4, 3), (6, 2)]) for mesh in (both["a"], both["b"])]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = OPTIMIZERS[optimizer](params)
    with Collectives() as counted:
        opt.step()
    assert [c.name for c in counted.seen] == ["allreduce_"] * 2 * len(ROUNDS[optimizer])


@on("two")
@EVERY
def test_one_more_of_four_bytes_with_a_grad_scaler(optimizer):
    """What GradScaler hands to the step is agreed on by four bytes more; a step that is skipped says nothing else."""
    params = parameters(mesh_of(2), S0)
    opt, found = make(optimizer, params), []
    for infinite in (0.0, 1.0):
        opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(infinite)
        with Collectives() as counted:
            opt.step()
        found.append(counted.seen)
    taken, skipped = found
    assert taken == [("allreduce_", 4), *(("allreduce_", NUMBER * one["S(0)"]) for one in ROUNDS[optimizer])]
    assert skipped == [("allreduce_", 4)]


@on("two")
@EVERY
def test_the_same_bytes_without_gradients(optimizer):
    """The same bytes, whoever has a gradient."""
    params = parameters(mesh_of(2), S0)
    if dist.get_rank() == 1:
        for p in params:
            p.grad = None
    opt = make(optimizer, params)
    with Collectives() as counted:
        opt.step()
    assert counted.seen == [("allreduce_", NUMBER * one["S(0)"]) for one in ROUNDS[optimizer]]


@on("two")
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, float("inf")])
def test_clip_grad_norm_asks_once(order, error):
    """Twice with error_if_nonfinite, which takes the norm before it changes anything."""
    params = parameters(mesh_of(2), S1)
    with Collectives() as counted:
        fusedadam.clip_grad_norm_(params, 1.0, order, error_if_nonfinite=error)
    assert counted.seen == [("allreduce_", NUMBER * 2 * ALL)] * (1 + error)


@on("two")
def test_partial_gradients_are_added_up():
    """A gradient that is still to be added up over the processes costs that, in every step."""
    param = parameter(torch.ones(4, 4), mesh_of(2), R)
    param.grad = DTensor.from_local(torch.ones(4, 4), mesh_of(2), [Partial()], run_check=False)
    opt, seen = fusedadam.AdamW([param]), []
    for _ in range(3):
        with Collectives() as counted:
            opt.step()
        seen.append(counted.seen)
    assert set(seen[0]) == {("all_reduce", 64)}
    assert seen[1:] == [[("all_reduce", 64)]] * 2


@on("two")
def test_the_counter_sees_every_kind():
    found = []
    value = torch.ones(4, 4)
    whole = compat.distribute(value, mesh_of(2), [S0])
    for work in (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.broadcast(torch.ones(2), 0),
        lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2)),
        lambda: dist.barrier(),
        lambda: whole.full_tensor(),
        lambda: whole.redistribute(placements=[S1]),
        lambda: dist.all_gather_object([None, None], 3),
        lambda: divided_like(value, whole),
    ):
        with Collectives() as counted:
            work()
        found.append([c.name for c in counted.seen])
    *others, nothing = found
    assert all(others)
    assert nothing == []
