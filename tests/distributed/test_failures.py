"""If a process fails during a step, the others soon raise, and do not hang."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fusedadam
from tests.distributed.parts import S0, divided_like, mesh_of, parameter
from tests.distributed.reference import make
from tests.distributed.world import LIMIT, Answer, World, on
from tests.meaning.made_to_measure import values

SHAPES = [(5, 6), (4,), (7, 3), (3, 4)]
# In which the others must raise, however busy the machine: without the one that failed, they would wait for LIMIT.
SOON = LIMIT * 2 / 3
DEAD = 7  # the exit code of the one that fails


@pytest.fixture
def doomed() -> Iterator[World]:
    """Three processes of which one will not survive."""
    world = World(3)
    yield world
    world.end()


def trained(optimizer: str, mesh: Any) -> tuple[Any, list[Any]]:
    wholes = [v.float() for v in values(SHAPES)]
    params = [parameter(v, mesh, S0) for v in wholes]
    opt = make(optimizer, params)
    for p, v in zip(params, wholes, strict=True):
        p.grad = divided_like(v, p)
    opt.step()
    return opt, params


def prepare(optimizer: str) -> None:
    """Kernels are compiled and modules imported before anyone looks at the time."""
    trained(optimizer, mesh_of(3))


def failing(world: World, optimizer: str, function: Any, *arguments: Any) -> list[Answer]:
    world.run(prepare, optimizer)
    return world.outcomes(function, *arguments, grace=SOON)


def die_in_all_reduce(which: int) -> None:
    """From now on this process ends when it is about to take part in an all-reduce for the ``which``-th time."""
    real, times = dist.all_reduce, [0]

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        times[0] += 1
        if times[0] == which:
            os._exit(DEAD)
        return real(*args, **kwargs)

    dist.all_reduce = all_reduce


def die(optimizer: str, which: int, where: str) -> None:
    opt, params = trained(optimizer, mesh_of(3))
    if dist.get_rank() == 1:
        die_in_all_reduce(which)
    if where == "clipping":
        fusedadam.clip_grad_norm_(params, 1.0)
        return
    if where == "a scaled step":
        opt.grad_scale, opt.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    opt.step()


def assert_the_others_end(answers: list[Answer]) -> None:
    for rank, answer in enumerate(answers):
        assert not answer.ok, rank
        if rank == 1:
            assert answer.value == f"the process ended, with exit code {DEAD}"
        else:
            assert "Traceback" in answer.value, answer.value  # an error of its own, and not that it did not answer
            assert "all_reduce" in answer.value


@pytest.mark.parametrize(
    ("optimizer", "which", "where"),
    [
        ("AdamP", 1, "a step"),
        ("AdamP clipped", 2, "a step"),
        ("BertAdam over all", 1, "a step"),
        ("AdamW", 1, "a scaled step"),
        ("AdamW", 1, "clipping"),
    ],
)
def test_a_rank_that_dies(doomed, optimizer, which, where):
    assert_the_others_end(failing(doomed, optimizer, die, optimizer, which, where))


def refuse(bad: str) -> None:
    """Its gradients are refused, before it takes part in anything; then it ends, as a script does that raises."""
    opt, params = trained("AdamP", mesh_of(3))
    if dist.get_rank() == 1:
        if bad == "shape":
            params[2].grad._local_tensor = torch.ones(2, 2)
        else:
            opt.param_groups[0]["lr"] = "much"
        try:
            opt.step()
        except Exception:
            os._exit(DEAD)
        return
    opt.step()


@pytest.mark.parametrize("bad", ["shape", "option"])
def test_a_rank_that_raises_and_ends(doomed, bad):
    assert_the_others_end(failing(doomed, "AdamP", refuse, bad))


def late() -> float:
    """One process does not come within the time that the group waits for it."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    opt, _ = trained("AdamP", DeviceMesh.from_group(group, "cpu"))
    dist.barrier()
    if dist.get_rank() == 1:
        return 0.0
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        opt.step()
    return time.monotonic() - begun


def test_a_rank_that_is_late(doomed):
    """The time that the process group was given counts."""
    doomed.run(prepare, "AdamP")
    waited = doomed.run(late)
    assert 1 < max(waited) < SOON


def test_the_harness_says_where_a_rank_hangs(doomed):
    doomed.run(dist_rank)
    begun = time.monotonic()
    answers = doomed.outcomes(hang, limit=10)
    assert time.monotonic() - begun < LIMIT
    assert [a.ok for a in answers] == [True, False, True]
    assert re.match(r"did not answer within \d+ s", answers[1].value)
    assert "in hang" in answers[1].value
    assert doomed.run(dist_rank) == [0, 1, 2]  # the next ones have a world of their own


def hang() -> None:
    if dist.get_rank() == 1:
        time.sleep(2 * LIMIT)


def dist_rank() -> int:
    return dist.get_rank()


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="the processes do not return the same")
@on("two")
def test_the_harness_compares_what_processes_return():
    return dist.get_rank()


def test_the_harness_says_what_was_raised_and_where(doomed):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 3: Traceback.*in bad_luck.*ValueError: bad luck"):
        doomed.run(bad_luck)


def bad_luck() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad luck")
