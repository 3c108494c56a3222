"""Changes of sharded tensors between steps are detected, by the compiled snapshot loop and by the Python one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

import fusedadam
from fusedadam.engine.changes import snapshot
from tests.distributed.parts import S0, S1, R, divided, from_part, here, mesh_of, parameter
from tests.distributed.world import on

LOOKS = pytest.mark.parametrize("look", ["compiled", "plain"])


@contextlib.contextmanager
def looking(look: str) -> Iterator[None]:
    kept = snapshot.prepare_loop
    assert kept() is not None, "the compiled one is not to be had"
    try:
        if look == "plain":
            snapshot.prepare_loop = lambda: None  # type: ignore[assignment]
        yield
    finally:
        snapshot.prepare_loop = kept


def counting(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def trained(params: list[Any], steps: int = 2, **options: Any) -> Any:
    opt = fusedadam.AdamW(params, lr=0.1, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    return opt


@on("two")
@LOOKS
def test_another_local_tensor(look):
    with looking(look):
        param, other = (parameter(counting((4, 3)), mesh_of(2), S0) for _ in range(2))
        opt, untouched = trained([param]), trained([other])
        before = here(param)
        param._local_tensor = before.clone()
        states = opt.state[param]
        states["exp_avg"]._local_tensor = states["exp_avg"]._local_tensor.clone()
        kept = before.clone()
        opt.step()
        untouched.step()
        assert torch.equal(before, kept), "the old one was written"
        assert torch.equal(here(param), here(other))


@on("two")
@LOOKS
def test_another_layout_of_the_local_tensor(look):
    """The same numbers in another order of memory."""
    with looking(look):
        param, other = (parameter(counting((4, 3)), mesh_of(2), S0) for _ in range(2))
        opt, untouched = trained([param]), trained([other])
        param._local_tensor = here(param).t().contiguous().t()
        opt.step()
        untouched.step()
        assert torch.equal(here(param), here(other))
        assert not here(param).is_contiguous()


@on("two")
@LOOKS
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_another_placement_of_the_gradient(look, max_grad_norm):
    """The local gradient is as it was, but now it is only this process's part of a sum."""
    with looking(look):
        mesh = mesh_of(2)
        param, alone = parameter(counting((4, 3)), mesh, R), torch.nn.Parameter(counting((4, 3)))
        opt = fusedadam.AdamW([param], lr=0.1, max_grad_norm=max_grad_norm)
        single = fusedadam.AdamW([alone], lr=0.1, max_grad_norm=max_grad_norm)
        mine = torch.full((4, 3), 1.0 + dist.get_rank())
        for placement in (R, Partial(), Partial(), R):
            # the very same tensor: nothing but how it is divided is another
            param.grad = DTensor.from_local(mine, mesh, [placement], run_check=False)
            alone.grad = torch.full((4, 3), 3.0) if placement.is_partial() else mine.clone()
            opt.step()
            single.step()
            assert torch.equal(here(param), alone.detach()), placement
            assert torch.equal(mine, torch.full((4, 3), 1.0 + dist.get_rank())), "gradients are read, never written"


@on("four")
@LOOKS
def test_rows_and_columns_swapped_in_the_gradient(look):
    """Rows over one dimension of the mesh and columns over the other, or the other way around: parts are alike."""
    with looking(look):
        mesh = mesh_of(2, 2)
        param, alone = parameter(counting((4, 4)), mesh, S0, S1), torch.nn.Parameter(counting((4, 4)))
        opt, single = fusedadam.AdamP([param], lr=0.1), fusedadam.AdamP([alone], lr=0.1)
        whole = counting((4, 4)).sin()
        for placements in ([S0, S1], [S1, S0], [S0, S1]):
            param.grad, alone.grad = divided(whole, mesh, placements), whole
            assert param.grad._local_tensor.shape == (2, 2)
            opt.step()
            single.step()
            torch.testing.assert_close(param.full_tensor(), alone.detach(), rtol=1e-6, atol=1e-6)


@on("two")
@LOOKS
def test_a_gradient_that_becomes_a_plain_tensor(look):
    with looking(look):
        param, whole = parameter(counting((4, 3)), mesh_of(2), R), torch.nn.Parameter(counting((4, 3)))
        opt = trained([param, whole])
        before = here(param).clone(), whole.detach().clone()
        plain, divided_one = torch.ones(4, 3), torch.ones_like(param)
        for grads, text in (
            ((plain, plain), "grad is a plain tensor, but its param is a DTensor"),
            ((divided_one, divided_one), "grad is a DTensor, but its param is a plain tensor"),
        ):
            param.grad, whole.grad = grads
            with pytest.raises(RuntimeError, match=text):
                opt.step()
            assert torch.equal(here(param), before[0])
            assert torch.equal(whole, before[1])
        param.grad, whole.grad = divided_one, plain
        opt.step()
        assert torch.equal(here(param), whole.detach())


@on("two")
@LOOKS
def test_a_state_that_is_divided_otherwise(look):
    with looking(look):
        param = parameter(counting((4, 4)), mesh_of(2), S0)
        opt = trained([param])
        opt.state[param]["exp_avg"] = divided(torch.zeros(4, 4), mesh_of(2), [S1])
        with pytest.raises(RuntimeError, match="state 'exp_avg' is not sharded as its param is"):
            opt.step()
        opt.state[param]["exp_avg"] = torch.zeros(2, 4)
        with pytest.raises(RuntimeError, match="state 'exp_avg' is not sharded as its param is"):
            opt.step()


@on("two")
@LOOKS
@pytest.mark.parametrize("cls", ["AdamW", "AdamP"])
def test_what_has_not_changed_is_not_made_anew(look, cls):
    """New gradients with equal descriptions are no reason to make a plan anew, nor even to look twice."""
    with looking(look):
        params = [parameter(counting((4, 4)), mesh_of(2), p) for p in (S0, S1, R)]
        opt = getattr(fusedadam, cls)(params)
        plans = set()
        for _ in range(4):
            for p in params:
                p.grad = from_part(torch.ones_like(here(p)), p.shape, mesh_of(2), p.placements)
            opt.step()
            plans.add(id(opt._stepper.last_plan))
        assert len(plans) == 1


@on("two")
@LOOKS
def test_a_gradient_that_is_under_way(look):
    """A gradient whose communication has begun, and is waited for when it is used."""
    with looking(look):
        mesh = mesh_of(2)
        param, alone = parameter(counting((4, 3)), mesh, R), torch.nn.Parameter(counting((4, 3)))
        opt = fusedadam.AdamW([param], lr=0.1, max_grad_norm=1.0)
        single = fusedadam.AdamW([alone], lr=0.1, max_grad_norm=1.0)
        mine = torch.full((4, 3), 1.0 + dist.get_rank())
        for asynchronous in (False, True, True, False):
            part = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
            param.grad = part.redistribute(placements=[R], async_op=asynchronous)
            alone.grad = torch.full((4, 3), 3.0)
            assert (type(param.grad._local_tensor) is torch.Tensor) != asynchronous
            opt.step()
            single.step()
            assert torch.equal(here(param), alone.detach()), asynchronous
            part = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
            param.grad = part.redistribute(placements=[R], async_op=asynchronous)
            norm = fusedadam.clip_grad_norm_([param], 1.0)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([alone], 1.0))
            torch.testing.assert_close(param.grad.full_tensor(), alone.grad)


@on("two")
@LOOKS
def test_a_local_shard_of_another_dtype(look):
    """The offset of a shard counts in its own elements, not in the DTensor's."""
    with looking(look):
        param, other = parameter(torch.zeros(8), mesh_of(2), S0), torch.nn.Parameter(torch.zeros(4))
        param.grad, other.grad = torch.ones_like(param), torch.ones(4)
        memory = torch.full((100,), -1.0, dtype=torch.bfloat16)
        memory[16:20] = 1
        param.grad._local_tensor = memory[16:20]
        opt = fusedadam.AdamW([param, other], lr=1.0, weight_decay=0.0)
        opt.step()
        other.grad = other.grad.clone()
        opt.step()
        assert here(param).tolist() == pytest.approx([-2.0] * 4)
