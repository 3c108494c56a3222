"""GradScaler: an infinity on one process makes all processes that have shards of the same model skip the step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from tests.distributed.follow import assert_same_parts
from tests.distributed.parts import S0, S1, R, divided_like, here, mesh_of, parameter
from tests.distributed.reference import SMALLER, make
from tests.distributed.test_backward import loss_of, mine
from tests.distributed.test_wrappers import fsdp1
from tests.distributed.world import on
from tests.meaning.made_to_measure import gradient, values

OPTIMIZERS = ("AdamW", "EmaAdamW", "AdamP clipped", "BertAdam", "BertAdam over all", "Adan", "Lion clipped", "Muon")
OPTIMIZERS += (*SMALLER,)
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS)
SHAPES = [(5, 6), (4,), (7, 3), (3, 4)]
LAYOUTS = {
    "all divided": [S0, S1, S0, S1],
    "the first is everywhere": [R, R, S0, S1],
    "the last alone is divided": [R, R, R, S0],
}
SCALE = 1024.0


def start(layout: str) -> tuple[list[Any], list[torch.nn.Parameter]]:
    wholes = [v.float() for v in values(SHAPES)]
    mine = [parameter(v, mesh_of(2), p) for v, p in zip(wholes, LAYOUTS[layout], strict=True)]
    return mine, [torch.nn.Parameter(v) for v in wholes]


def scaled_step(scaler: Any, opt: Any, unscale: bool) -> None:
    scaler.scale(torch.tensor(1.0))  # which begins it
    if unscale:
        scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()


def skip_and_step(optimizer: str, layout: str, unscale: bool) -> list[float]:
    """The last parameter's part on the last process has an infinity in the second of four steps."""
    mine, alone = start(layout)
    opt, single = make(optimizer, mine), make(optimizer, alone)
    scaler, generator, scales = torch.amp.GradScaler("cpu", init_scale=SCALE), torch.Generator().manual_seed(4), []
    kinds = ("channels well below", "all well above", "layer well below")
    seen = []
    for step in range(4):
        scale = scaler.get_scale()
        for k, (p, q) in enumerate(zip(mine, alone, strict=True)):
            q.grad = gradient(q.detach(), kinds[(k + step) % 3], step, generator).float()
            p.grad = divided_like(q.grad * scale, p)
            seen.append(q.grad)
        if step == 1 and dist.get_rank() == 1:
            here(mine[-1].grad).view(-1)[0] = math.inf
        before = [here(t).clone() for p in mine for t in (p, *opt.state.get(p, {}).values())]
        left = [here(p.grad) / (1 if step == 1 else scale) for p in mine]
        scaled_step(scaler, opt, unscale)
        if not unscale:
            assert all(torch.equal(here(p.grad), g) for p, g in zip(mine, left, strict=True)), "not left unscaled"
        scales.append(scaler.get_scale())
        after = [here(t) for p in mine for t in (p, *opt.state.get(p, {}).values())]
        if step == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "not skipped"
        else:
            single.step()
    for k, (p, q) in enumerate(zip(mine, alone, strict=True)):
        assert opt.state[p]["step"] == 3
        assert_same_parts(p, opt.state[p], q.detach(), single.state[q], seen[k :: len(mine)], f"parameter {k}")
    return scales


UNSCALED = pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])


@EVERY
@UNSCALED
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_infinity_on_one_rank_skips_the_step_on_all(two, layout, unscale, optimizer):
    two.run(skip_and_step, optimizer, layout, unscale)


@UNSCALED
def test_all_ranks_lower_the_scale(two, unscale):
    one, other = two.run(skip_and_step, "AdamW", "all divided", unscale)
    assert one == other == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]


@pytest.mark.xfail(strict=True, reason="torch asks the other processes only if the first gradient is divided")
def test_all_ranks_lower_the_scale_if_the_first_is_everywhere(two):
    one, other = two.run(skip_and_step, "AdamW", "the first is everywhere", False)
    assert one == other


@on("two")
def test_gradients_that_are_still_to_be_summed_are_left_unscaled():
    """A parameter without dimensions, and zeros without memory, as gradients that are still to be summed."""
    params = [parameter(torch.ones(()), mesh_of(2), R), parameter(torch.ones(4), mesh_of(2), S0)]
    opt = make("AdamW", params)
    for p, local in zip(params, (torch.full((), 4.0), torch._efficientzerotensor((4,))), strict=True):
        p.grad = DTensor.from_local(local, mesh_of(2), [Partial()], run_check=False)
    opt.grad_scale, opt.found_inf = torch.full((1,), 4.0), torch.zeros(1)
    opt.step()
    assert params[0].grad.full_tensor() == 2


@on("two")
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamP clipped"])
def test_gradients_that_are_sharded_differently_are_left_unscaled(optimizer):
    """Kernels see a copy of a gradient that is sharded differently from its parameter; the gradient is divided, too."""
    shapes = [(6, 4), (8,)]
    params = [parameter(v.float(), mesh_of(2), S0) for v in values(shapes)]
    grads = [torch.arange(float(math.prod(s))).view(s) for s in shapes]
    opt = make(optimizer, params)
    for found_inf in (0.0, 1.0, 0.0):
        for p, g, placement in zip(params, grads, (S1, R), strict=True):
            p.grad = distribute_tensor(g * 4, mesh_of(2), [placement])
        opt.grad_scale, opt.found_inf = torch.tensor(4.0), torch.tensor(found_inf)
        opt.step()
        for p, g in zip(params, grads, strict=True):
            assert torch.equal(p.grad.full_tensor(), g * (4 if found_inf else 1))
    assert all(opt.state[p]["step"] == 2 for p in params)


@on("two")
@pytest.mark.parametrize("unscale", [False, True])
def test_an_infinity_in_a_flat_parameter(unscale):
    """Scale and step counts after each of three steps, of which the second has an infinity on one rank."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    net = fsdp1(True)
    opt, scaler, said = make("AdamW", list(net.parameters())), ShardedGradScaler(device="cpu", init_scale=4.0), []
    for step in range(3):
        opt.zero_grad()
        scaler.scale(loss_of(net(mine(step)), mine(step))).backward()
        if step == 1 and dist.get_rank() == 0:
            next(p.grad for p in net.parameters() if p.numel()).view(-1)[0] = math.inf
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        said.append((scaler.get_scale(), sorted({float(state["step"]) for state in opt.state.values()})))
    assert said == [(4.0, [1.0]), (2.0, [1.0]), (2.0, [2.0])]


@on("four")
@EVERY
@pytest.mark.parametrize("bad", [0, 3])
def test_an_infinity_beside_several_meshes(bad, optimizer):
    """torch's GradScaler takes no several meshes, and no plain tensors among them; who hands over ``found_inf`` may."""
    both = mesh_of(2, 2)
    where = [None, (both["a"], S0), (both["b"], S1), (both, R, S0)]
    wholes = [v.float() for v in values(SHAPES)]
    params = [
        torch.nn.Parameter(v.clone()) if own is None else parameter(v, *own)
        for v, own in zip(wholes, where, strict=True)
    ]
    opt = make(optimizer, params)
    for step in range(3):
        for p, v in zip(params, wholes, strict=True):
            p.grad = divided_like(v + step, p)
        opt.grad_scale = torch.tensor(1.0)
        opt.found_inf = torch.tensor(float(step == 1 and dist.get_rank() == bad))
        handed = opt.found_inf.clone()
        before = [here(t).clone() for p in params for t in (p, *opt.state.get(p, {}).values())]
        opt.step()
        assert torch.equal(opt.found_inf, handed), "what was handed over is the caller's"
        after = [here(t) for p in params for t in (p, *opt.state[p].values())]
        if step == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "not skipped"
        if step == 2:
            assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "not taken"
    assert all(opt.state[p]["step"] == 2 for p in params)


@on("two")
@EVERY
def test_a_step_that_is_not_finite_is_left_out_by_all_processes(optimizer):
    """Without a scaler: a shard of one process has a NaN, and all leave the step out."""
    params, _ = start("the first is everywhere")
    opt = make(optimizer, params)
    for group in opt.param_groups:
        group["skip_nonfinite"] = True
    steps = []
    for step in range(3):
        for k, p in enumerate(params):
            p.grad = divided_like(torch.linspace(-1, 2 + step, math.prod(SHAPES[k])).view(SHAPES[k]), p)
        before = [here(p).clone() for p in params]
        if step == 1 and dist.get_rank() == 1:
            here(params[2].grad)[0] = math.nan
        opt.step()
        assert step != 1 or all(torch.equal(here(p), b) for p, b in zip(params, before, strict=True))
        steps.append(float(opt.state[params[0]]["step"]))
    assert steps == [1.0, 1.0, 2.0]
    assert opt.skipped_steps == 1


@on("two")
@pytest.mark.parametrize("placement", [S0, R], ids=str)
def test_no_process_has_a_gradient(placement):
    """torch's scaler adds up what it has found on each device: a plain 0, where there is no gradient."""
    params = [parameter(v.float(), mesh_of(2), placement) for v in values(SHAPES)]
    before = [here(p).clone() for p in params]
    for optimizer, options in (("AdamW", {}), ("AdamW", {"skip_nonfinite": True}), ("Adafactor", {})):
        opt, scaler = make(optimizer, params, **options), torch.amp.GradScaler("cpu")
        scaler.scale(torch.tensor(1.0))
        scaler.step(opt)
        assert opt.skipped_steps == 0
        assert all(torch.equal(here(p), value) for p, value in zip(params, before, strict=True))
