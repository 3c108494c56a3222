"""Gradients that only some processes have: all processes take part in every all-reduce, and none hangs.

A process without a gradient updates nothing and adds nothing to sums: its shard has a history, and step counts, of its
own. test_presence.py has the exception: states that processes share.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

import fusedadam
from tests.distributed.follow import assert_same_norm, assert_same_parts
from tests.distributed.parts import S0, S1, R, divided_like, expected_here, here, mesh_of, parameter
from tests.distributed.reference import NOT_SHARED, STEPS, after, make
from tests.distributed.world import on
from tests.meaning.made_to_measure import gradient, values

OPTIMIZERS = ("AdamW", "AdamP", "AdamP clipped", "BertAdam", "BertAdam by group", "Adan", "Lion clipped", *NOT_SHARED)
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS)
SHAPES = [(5, 6), (7,), (6, 4), (3, 8)]
MISSING = {  # which parameters have no gradient, by rank
    "one on one rank": {1: [0]},
    "a vector on one rank": {0: [1]},
    "several on several ranks": {0: [1, 2], 2: [0, 2]},
    "all on the first rank": {0: [0, 1, 2, 3]},
    "all on the last rank": {2: [0, 1, 2, 3]},
    "all but one of all ranks": {0: [0, 1, 2, 3], 1: [0, 1, 3], 2: [0, 1, 2, 3]},
    "all on all": {rank: [0, 1, 2, 3] for rank in range(3)},
}


def with_holes(p: Tensor, kind: str, step: int, generator: Any, dim: int, silent: list[int]) -> Tensor:
    """A gradient that is zero where silent ranks have their part, and for the rest as AdamP's tests want it."""
    grad = torch.zeros_like(p, dtype=torch.float64)
    every = p.double().chunk(3, dim)
    there = [k for k in range(len(every)) if k not in silent]
    if there:
        measured = gradient(torch.cat([every[k] for k in there], dim), kind, step, generator)
        targets = [grad.chunk(3, dim)[k] for k in there]
        for target, value in zip(targets, measured.split([t.shape[dim] for t in targets], dim), strict=True):
            target.copy_(value)
    return grad.float()


@on("three")
@EVERY
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_gradients_that_are_missing_on_some(missing, placement, optimizer):
    """Beside one process whose gradients are zero where they are missing here: its norms are the same, and so are its
    projections by channel, and what it makes of rows that are there."""
    mesh, rank = mesh_of(3), dist.get_rank()
    start = [v.float() for v in values(SHAPES)]
    alone = [torch.nn.Parameter(v.clone()) for v in start]
    params = [parameter(v, mesh, placement) for v in start]
    opt, single = make(optimizer, params), make(optimizer, alone)
    generator, said, seen = torch.Generator().manual_seed(2), [], []
    # of rows that are divided and have holes the cosine is another: only those that are not projected are the same
    kinds = ("channels well below", "all well above") if placement == S0 else ("all well above",)
    for step in range(STEPS):
        for k, (p, q) in enumerate(zip(params, alone, strict=True)):
            silent = [r for r, own in missing.items() if k in own]
            grad = with_holes(q.detach(), kinds[(step + k) % len(kinds)], step, generator, p.placements[0].dim, silent)
            q.grad = grad if len(silent) < 3 else None
            p.grad = None if rank in silent else divided_like(grad, p)
            seen.append(grad)
        opt.step()
        single.step()
        said.append(after(opt, params))
        expected = after(single, alone)
        assert said[-1][1] == expected[1], f"step {step}"
        if expected[0] is not None:
            assert_same_norm(said[-1][0], expected[0], f"step {step}")
    for k, (p, q) in enumerate(zip(params, alone, strict=True)):
        if k in missing.get(rank, ()):
            assert torch.equal(here(p), expected_here(start[k], p)), k
            assert not opt.state.get(p), k
            continue
        assert opt.state[p]["step"] == STEPS
        assert_same_parts(p, opt.state[p], q.detach(), single.state[q], seen[k :: len(params)], f"parameter {k}")
    # and all together again: what was missing begins now
    for p, value in zip(params, start, strict=True):
        p.grad = divided_like(value, p)
    opt.step()
    assert all(here(p).isfinite().all() for p in params)
    assert [opt.state[p]["step"].item() for p in params] == [
        1 if k in missing.get(rank, ()) else STEPS + 1 for k in range(len(params))
    ]
    said.append(after(opt, params))
    return said


@on("three")
@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_clipping_with_gradients_that_are_missing_on_some(missing, placement, order):
    mesh, rank = mesh_of(3), dist.get_rank()
    start = [v.float() for v in values(SHAPES)]
    params, alone = [parameter(v, mesh, placement) for v in start], []
    for k, p in enumerate(params):
        silent = [r for r, own in missing.items() if k in own]
        generator = torch.Generator().manual_seed(k)
        grad = with_holes(start[k], "all well above", 0, generator, p.placements[0].dim, silent)
        p.grad = None if rank in silent else divided_like(grad, p)
        alone.append(torch.nn.Parameter(start[k]))
        alone[-1].grad = grad
    expected = torch.nn.utils.clip_grad_norm_(alone, 0.5, order)
    norm = fusedadam.clip_grad_norm_(params, 0.5, order)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for p, q in zip(params, alone, strict=True):
        if p.grad is not None:
            torch.testing.assert_close(here(p.grad), expected_here(q.grad, p), rtol=1e-6, atol=0)
    return norm.item()


def rebuild_on_one_rank() -> list[Any]:
    """On a mesh whose group has to be made for us: only one process looks for it again, and must not wait there."""
    mesh, said = mesh_of(2, 2, 1)["b", "c"], []
    wholes = [v.float() for v in values([(5, 6), (6, 4)])]
    params = [parameter(v, mesh, S0, S1) for v in wholes]
    opt = make("AdamP clipped", params)
    for step in range(4):
        for k, (p, v) in enumerate(zip(params, wholes, strict=True)):
            p.grad = None if k == step % 2 == 1 and dist.get_rank() == 0 else divided_like(v, p)
        opt.step()
        said.append(after(opt, params))
        fusedadam.clip_grad_norm_(params, 1.0)
    return said


def test_one_process_alone_makes_its_plan_anew(four):
    said = four.run(rebuild_on_one_rank)
    assert said[0] == said[1]
    assert said[2] == said[3]


@on("two")
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamP"])
def test_one_process_alone_makes_its_plan_beside_summands(optimizer):
    """A gradient whose summands are still to be added up; one process makes a plan alone, and must send nothing."""
    mesh, rank, said = mesh_of(2), dist.get_rank(), []
    norm, matrix = parameter(torch.ones(4), mesh, R), parameter(torch.ones(4, 4), mesh, S0)
    whole = torch.nn.Parameter(torch.ones(3))
    opt = make(optimizer, [norm, matrix, whole])
    for step in range(4):
        norm.grad = DTensor.from_local(torch.full((4,), float(rank + 1 + step)), mesh, [Partial()], run_check=False)
        matrix.grad = divided_like(torch.ones(4, 4), matrix)
        whole.grad = None if step == 1 and rank == 0 else torch.ones(3)
        opt.step()
        others = torch.full((3,), 10.0**step)  # of the training itself: it meets its own kind
        dist.all_reduce(others)
        said += [float(others[0]), float(here(norm)[0])]
    assert said[::2] == [2.0, 20.0, 200.0, 2000.0]
    return said


@on("two")
@pytest.mark.parametrize(
    ("frozen", "gradients", "norms"),
    [
        ([False, False, True], [[True, False], [True, False], [False, False]], [24, 24, 16]),
        ([True, False, False], [[False, False], [True, False], [True, False]], [16, 24, 24]),
        ([False, True, True], [[True, True], [True, False], [False, False]], [32, 24, 16]),
    ],
    ids=["freeze", "thaw", "a gradient from before"],
)
def test_parameters_are_frozen_and_thawed_on_the_way(frozen, gradients, norms):
    """Of the second parameter: when it is frozen, and on which ranks it has a gradient nevertheless."""
    mesh, rank = mesh_of(2), dist.get_rank()
    a, b = (parameter(torch.ones(4, 4), mesh, S0) for _ in range(2))
    opt = fusedadam.AdamW([a, b], max_grad_norm=1.0)
    for is_frozen, has, norm in zip(frozen, gradients, norms, strict=True):
        b.requires_grad_(not is_frozen)
        a.grad = divided_like(torch.ones(4, 4), a)
        b.grad = divided_like(torch.ones(4, 4), b) if has[rank] else None
        opt.step()
        assert float(opt.grad_norm**2) == pytest.approx(norm)


@on("two")
def test_a_parameter_that_is_listed_twice_counts_once():
    a, b = (parameter(torch.ones(4, 4), mesh_of(2), S0) for _ in range(2))
    a.grad = divided_like(torch.ones(4, 4), a) if dist.get_rank() == 0 else None
    b.grad = divided_like(torch.ones(4, 4), b)
    norm = fusedadam.clip_grad_norm_([a, a, b], 1.0)
    assert float(norm**2) == pytest.approx(8 + 16)
    assert float(here(b.grad)[0, 0] * norm) == pytest.approx(1.0)
