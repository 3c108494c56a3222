"""States that processes share stay the same on all of them, if only some have a gradient.

A process without a gradient takes the step with a gradient of zeros, where its copy of a state is computed from sums
over all shards. Without sums nothing is sent, and each shard has a history of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedadam
from tests.distributed.collectives import Collectives
from tests.distributed.parts import S0, S1, R, digest, divided_like, expected_here, here, mesh_of, parameter
from tests.distributed.reference import NOT_SHARED, STEPS, make
from tests.distributed.test_missing_gradients import MISSING
from tests.distributed.world import on
from tests.meaning.made_to_measure import values

SHAPES = [(5, 6), (7,), (6, 4), (3, 8)]


def make_adafactor(params: list[Any], **options: Any) -> Any:
    """A vector shares no state. A process without a gradient leaves it out of its size, for which eps[1] stands in."""
    groups = [{"params": params[1:2], "eps": (1e-3, 1e3)}, {"params": [params[0], *params[2:]]}]
    return fusedadam.Adafactor(groups, lr=1e-2, weight_decay=0.1, **options)


def train(
    mesh_shape: tuple[int, ...], placements: list[Any], missing: dict[int, list[int]], options: dict[str, Any]
) -> list[str]:
    """Beside one process whose gradients are zero where they are missing here. In the second step none is. Returns what
    all processes should have."""
    mesh, rank, size = mesh_of(*mesh_shape), dist.get_rank(), dist.get_world_size()
    start, generator = [v.float() for v in values(SHAPES)], torch.Generator().manual_seed(3)
    alone = [torch.nn.Parameter(v.clone()) for v in start]
    params = [parameter(v, mesh, *placements) for v in start]
    scale = options.get("scale", 1.0)
    given = {name: value for name, value in options.items() if name != "scale"}
    opt, single = make_adafactor(params, **given), make_adafactor(alone, **given)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    for step in range(STEPS):
        scaler.scale(torch.zeros(()))  # which begins it
        for k, (p, q) in enumerate(zip(params, alone, strict=True)):
            silent = [r for r, own in missing.items() if k in own and (step != 1 or p.dim() == 1)]
            grad = divided_like(torch.randn(p.shape, generator=generator), p)
            here(grad).mul_(rank not in silent)
            q.grad = grad.full_tensor() if len(silent) < size else None  # type: ignore[attr-defined]
            p.grad = None if rank in silent else grad * scale
        had = [p.grad for p in params]
        scaler.step(opt)
        scaler.update()
        single.step()
        assert all(p.grad is grad for p, grad in zip(params, had, strict=True)), "gradients are the user's"
    shared = []
    for k, (p, q) in enumerate(zip(params, alone, strict=True)):
        if k in missing.get(rank, ()) and p.dim() == 1:
            assert torch.equal(here(p), expected_here(start[k], p)), k
            assert not opt.state.get(p), k
            continue
        torch.testing.assert_close(here(p), expected_here(q.detach(), p), rtol=1e-5, atol=1e-6)
        assert list(opt.state.get(p, {})) == list(single.state.get(q, {})), k
        for name, value in opt.state.get(p, {}).items():
            expected = single.state[q][name] if name == "step" else expected_here(single.state[q][name], value)
            torch.testing.assert_close(here(value), expected, rtol=1e-5, atol=0)
            is_shared = name == "step" or all(placement.is_replicate() for placement in value.placements)
            shared += [f"{name} of {k}: {digest([value])}"] if is_shared and p.dim() > 1 else []
    for p, value in zip(params, start, strict=True):  # and all together again
        p.grad = divided_like(value, p)
    opt.step()
    assert all(here(p).isfinite().all() for p in params)
    return shared


OPTIONS = {"plain": {}, "clipped": {"max_grad_norm": 1.0}, "eager": {"backend": "eager"}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("placement", [S0, S1], ids=str)
@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_shared_states_stay_the_same_on_all(three, missing, placement, options):
    one, other, last = three.run(train, (3,), [placement], missing, options)
    assert one == other == last
    assert {text.split()[0] for text in one} == {"step", "col_var" if placement == S0 else "row_var"}


@pytest.mark.parametrize(
    ("placements", "missing"),
    [([R, S0], {1: [0, 1], 3: [0, 1]}), ([S0, S1], {0: [0, 2], 3: [2, 3]}), ([S1, S0], {2: [0, 1, 2, 3]})],
    ids=str,
)
def test_on_two_dimensions(four, placements, missing):
    answers = four.run(train, (2, 2), placements, missing, {})
    assert all(answer == answers[0] for answer in answers)


def test_scaled_gradients(three):
    """Each process has some: torch's scaler itself hangs otherwise."""
    one, other, last = three.run(train, (3,), [S0], MISSING["several on several ranks"], {"scale": 4.0})
    assert one == other == last


@on("three")
@pytest.mark.parametrize("optimizer", ["AdamW", *NOT_SHARED])
def test_without_sums_each_shard_has_its_own_history(optimizer):
    """Each shard is as a parameter of its own that has a gradient in the same steps: its moments, its product of all
    mu, and its number of steps belong together."""
    mesh, rank = mesh_of(3), dist.get_rank()
    params = [parameter(v.float(), mesh, S0) for v in values(SHAPES)]
    alone = [torch.nn.Parameter(here(p).clone()) for p in params]
    opt, single = make(optimizer, params), make(optimizer, alone)
    for step in range(6):
        for k, (p, q, v) in enumerate(zip(params, alone, values(SHAPES), strict=True)):
            p.grad = None if (step + k + rank) % 3 == 0 else divided_like((v * (step - 2.5)).float(), p)
            q.grad = None if p.grad is None else here(p.grad)
        opt.step()
        single.step()
    for p, q in zip(params, alone, strict=True):
        assert torch.equal(here(p), q)
        assert opt.state[p].keys() == single.state[q].keys()
        assert all(torch.equal(here(value), single.state[q][name]) for name, value in opt.state[p].items())


@on("two")
@pytest.mark.parametrize(
    ("optimizer", "placement", "first"),
    [("Adafactor", S0, 1 * 4), ("Adafactor", S1, 2 * 4), *((name, S0, None) for name in NOT_SHARED)],
    ids=str,
)
def test_only_parameters_with_shared_states_are_asked_about(optimizer, placement, first):
    """In one all-reduce, four bytes each. Experts that are sharded along their first dimension share nothing."""
    params = [parameter(v.float(), mesh_of(2), placement) for v in values([(4, 6), (2, 4, 6), (8,)])]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = make(optimizer, params)
    opt.step()
    with Collectives() as counted:
        opt.step()
    assert (counted.seen[0].bytes if counted.seen else None) == first
