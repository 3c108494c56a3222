"""Norms are those of the whole gradients, on every process, and equal torch's norms of unsharded gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

import fusedadam
from tests.distributed.parts import S0, S1, R, divided_like, expected_here, here, mesh_of, parameter
from tests.distributed.reference import OPTIMIZERS, make
from tests.distributed.world import on
from tests.support import BF16, F32, F64

SHAPES = [(7, 5), (300,), (), (3, 4, 2, 2), (0, 3), (2, 3)]
ORDERS = [2.0, 1.0, 3.0, math.inf]
NEAR = {F64: 1e-12, F32: 2e-6, BF16: 1e-2}  # what two ways to sum, and to round a product, may differ by
LAYOUTS = {
    2: ((2,), ([S0], [S1], [R], None)),
    3: ((3,), ([S0], [S1])),
    4: ((2, 2), ([S0, S1], [S1, S0], [R, S0], [S1, R], None, [S0, S0])),
}
CLIPPING = [name for name in OPTIMIZERS if name.endswith(("clipped", "all"))]


def parameters(world: int, *dtypes: torch.dtype) -> tuple[list[Any], list[torch.nn.Parameter]]:
    """Divided, some of them plain beside them, and whole; all with gradients."""
    mesh, placements = LAYOUTS[world]
    generator = torch.Generator().manual_seed(0)
    mine, alone = [], []
    for shape, dtype, own in zip(SHAPES, itertools.cycle(dtypes), itertools.cycle(placements), strict=False):
        value, grad = (torch.randn(shape, generator=generator, dtype=F64).to(dtype) for _ in range(2))
        alone.append(torch.nn.Parameter(value))
        mine.append(torch.nn.Parameter(value.clone()) if own is None else parameter(value, mesh_of(*mesh), *own))
        alone[-1].grad, mine[-1].grad = grad, divided_like(grad, mine[-1])
    return mine, alone


def torchs_clip(params: list[torch.nn.Parameter], max_norm: float, order: float = 2.0) -> Tensor:
    """torch knows no largest value of nothing."""
    return torch.nn.utils.clip_grad_norm_([p for p in params if p.numel()], max_norm, order)


def assert_same_gradients(mine: list[Any], alone: list[Any], rtol: float) -> None:
    for p, q in zip(mine, alone, strict=True):
        torch.testing.assert_close(here(p.grad), expected_here(q.grad, p), rtol=rtol, atol=0, equal_nan=True)


def clip(world: int, order: float, dtypes: list[torch.dtype]) -> None:
    rtol = max(NEAR[d] for d in dtypes)
    for max_norm in (0.5, 1e6, math.inf):  # once it is scaled, twice it is not
        mine, alone = parameters(world, *dtypes)
        before = [p.grad for p in mine]
        expected = torchs_clip(alone, max_norm, order)
        norm = fusedadam.clip_grad_norm_(mine, max_norm, order)
        torch.testing.assert_close(norm.double(), expected.double(), rtol=rtol, atol=0)
        assert all(p.grad is grad for p, grad in zip(mine, before, strict=True))
        assert_same_gradients(mine, alone, rtol)
        gathered = [torch.empty_like(norm) for _ in range(world)]
        dist.all_gather(gathered, norm)
        assert all(torch.equal(norm, other) for other in gathered)


DTYPES = pytest.mark.parametrize("dtypes", [[F32], [F64], [BF16, F32]], ids=str)


@DTYPES
@pytest.mark.parametrize("order", ORDERS)
def test_clip_grad_norm_on_two(two, order, dtypes):
    two.run(clip, 2, order, dtypes)


@pytest.mark.parametrize("order", ORDERS)
def test_clip_grad_norm_on_three(three, order):
    three.run(clip, 3, order, [F32])


@pytest.mark.parametrize("order", ORDERS)
def test_clip_grad_norm_on_four(four, order):
    four.run(clip, 4, order, [F32])


@on("two")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("place", [0, 1], ids=["in a matrix", "in a part of a vector"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_on_one_rank(bad, place, order):
    """Only one process has a number in its gradients that is not finite."""
    mine, alone = parameters(2, F32)
    alone[place].grad.view(-1)[-1] = bad  # type: ignore[union-attr]
    for p, q in zip(mine, alone, strict=True):
        p.grad = divided_like(q.grad, p)
    own = [here(p.grad).isfinite().all().item() for p in mine]
    assert own[place] == (dist.get_rank() == 0)
    before = [here(p.grad).clone() for p in mine]
    with pytest.raises(RuntimeError, match="The total norm of order"):
        fusedadam.clip_grad_norm_(mine, 1.0, order, error_if_nonfinite=True)
    for p, grad in zip(mine, before, strict=True):
        assert torch.equal(here(p.grad).nan_to_num(), grad.nan_to_num())
    expected = torchs_clip(alone, 1.0, order)
    norm = fusedadam.clip_grad_norm_(mine, 1.0, order)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    assert not norm.isfinite()
    assert_same_gradients(mine, alone, 0)


@on("two")
@pytest.mark.parametrize("order", ORDERS)
def test_error_if_nonfinite_with_finite_gradients(order):
    mine, alone = parameters(2, F32)
    expected = torchs_clip(alone, 1.0, order)
    torch.testing.assert_close(fusedadam.clip_grad_norm_(mine, 1.0, order, error_if_nonfinite=True), expected)
    assert_same_gradients(mine, alone, 2e-6)


def step_clipped(world: int, optimizer: str) -> list[float]:
    """The step that clips is a clip and a step of one process, and leaves gradients as they are."""
    mine, alone = parameters(world, F32)
    opt, single = make(optimizer, mine), make(optimizer, alone)
    for group in single.param_groups:
        group["max_grad_norm"] = None
    norms = []
    for scale in (1.0, 0.01, 30.0):  # above the norm, below it, above it
        for p, q in zip(mine, alone, strict=True):
            q.grad = q.grad * scale  # type: ignore[operator]
            p.grad = divided_like(q.grad, p)
        before = [here(p.grad).clone() for p in mine]
        kept = [q.grad.clone() for q in alone]  # type: ignore[union-attr]
        expected = torchs_clip(alone, 1.0)
        opt.step()
        single.step()
        assert all(torch.equal(here(p.grad), grad) for p, grad in zip(mine, before, strict=True))
        torch.testing.assert_close(opt.grad_norm, expected, rtol=2e-6, atol=0)
        norms.append(opt.grad_norm.item())
        for p, q, grad in zip(mine, alone, kept, strict=True):
            torch.testing.assert_close(here(p), expected_here(q.detach(), p), rtol=1e-5, atol=1e-6)
            q.grad = grad
    return norms


@pytest.mark.parametrize("optimizer", CLIPPING)
def test_a_clipped_step_on_two(two, optimizer):
    one, other = two.run(step_clipped, 2, optimizer)
    assert one == other


@pytest.mark.parametrize("optimizer", CLIPPING)
def test_a_clipped_step_on_four(four, optimizer):
    answers = four.run(step_clipped, 4, optimizer)
    assert all(answer == answers[0] for answer in answers)


@on("two")
@pytest.mark.parametrize("optimizer", CLIPPING)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_clipped_step_with_a_number_that_is_not_finite(bad, optimizer):
    """As in one process: what is not finite on one rank is on none."""
    mine, alone = parameters(2, F32)
    alone[0].grad.view(-1)[-1] = bad  # type: ignore[union-attr]
    mine[0].grad = divided_like(alone[0].grad, mine[0])  # type: ignore[arg-type]
    opt, single = make(optimizer, mine), make(optimizer, alone)
    opt.step()
    single.step()
    torch.testing.assert_close(opt.grad_norm, single.grad_norm, equal_nan=True)
    assert not opt.grad_norm.isfinite()
    for p, q in zip(mine, alone, strict=True):
        torch.testing.assert_close(here(p), expected_here(q.detach(), p), equal_nan=True)


@on("two")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_adamp_projects_on_no_rank_what_is_not_finite_on_one(bad):
    """The rank without the bad number must not project either."""
    from tests.meaning.made_to_measure import gradient, values

    for placement in (S0, S1):
        (value,) = values([(6, 20)])
        grad = gradient(value, "channels well below", 0, torch.Generator().manual_seed(7))
        param = parameter(value, mesh_of(2), placement)
        grad[5, 19] = bad
        param.grad = divided_like(grad, param)
        optimizer = fusedadam.AdamP([param])
        optimizer.step()
        assert optimizer.projections()[param] == "none"
        expected = torch.zeros_like(value, dtype=torch.bool)
        expected[5, 19] = True
        assert torch.equal(here(param).isnan(), expected_here(expected, param))


@on("two")
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
def test_gradients_that_are_still_to_be_added_up(placement, max_norm):
    """Every process has a summand of the gradient, as tensor parallel leaves those of norms and biases."""
    rank, mesh = dist.get_rank(), mesh_of(2)
    summands = [torch.arange(12.0).view(4, 3), torch.full((4, 3), -2.0)]
    alone = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))]
    mine = [parameter(alone[0].detach(), mesh, placement), parameter(alone[1].detach(), mesh, S0)]
    alone[0].grad, alone[1].grad = sum(summands), torch.ones(5)
    mine[0].grad = DTensor.from_local(summands[rank].clone(), mesh, [Partial()], run_check=False)
    mine[1].grad = divided_like(torch.ones(5), mine[1])
    expected = torchs_clip(alone, max_norm)
    for _ in range(2):  # what is clipped now is no longer a summand
        norm = fusedadam.clip_grad_norm_(mine, max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        assert_same_gradients(mine, alone, 1e-6)
        assert mine[0].grad.placements == mine[0].placements  # type: ignore[attr-defined]
        expected = torchs_clip(alone, max_norm)


@on("two")
def test_what_is_written_is_counted_up_as_by_torch():
    """By how much torch's own in-place operation, clipping and a step count up what they have written, and its part."""
    param = parameter(torch.ones(4, 3), mesh_of(2), S0)
    param.grad = divided_like(torch.ones(4, 3), param)
    optimizer, grad, counted = OPTIMIZERS["AdamW"]([param]), param.grad, []
    writing = {
        lambda: grad.mul_(2.0): grad,
        lambda: fusedadam.clip_grad_norm_([param], 1.0): grad,
        optimizer.step: param,
    }
    for write, written in writing.items():
        before = [tensor._version for tensor in (written, here(written))]
        with torch.no_grad():
            write()
        counted.append([tensor._version - n for tensor, n in zip((written, here(written)), before, strict=True)])
    torchs, clipped, stepped = counted
    assert clipped == stepped == torchs
    assert torchs[0] == 1
