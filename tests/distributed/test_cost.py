"""The cost of steps on sharded parameters: it does not grow, and is close to that of plain tensors."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.parts import S0, S1, divided, here, mesh_of, parameter
from tests.distributed.reference import OPTIMIZERS
from tests.distributed.world import on


def moving(params: list[Any], step: int) -> None:
    """New gradients at new addresses, with descriptions of their own."""
    for p in params:
        p.grad = divided(torch.full(p.shape, step + 1.0), p.device_mesh, p.placements)


def now_and_then(params: list[Any], step: int) -> None:
    """Other parameters in every step, so that plans are made anew."""
    for k, p in enumerate(params):
        p.grad = torch.full_like(p, step + 1.0) if (step + k) % 3 else None


@on("two")
@pytest.mark.parametrize(
    ("optimizer", "gradients", "count"),
    [("AdamW", "moving", 300), ("AdamP", "moving", 300), ("AdamP clipped", "now_and_then", 90)],
)
def test_objects_and_memory_are_flat(optimizer, gradients, count):
    """Objects, blocks of Python's memory and bytes of the process, over so many steps."""
    params = [parameter(torch.ones(4, 4), mesh_of(2), S0 if k % 2 else S1) for k in range(3)]
    opt = OPTIMIZERS[optimizer](params)

    def steps(count: int) -> tuple[int, int, int]:
        kept = []  # a gradient of the step before is alive, so that addresses do change
        for k in range(count):
            globals()[gradients](params, k)
            opt.step()
            kept = [p.grad for p in params]
            opt.zero_grad(set_to_none=True)
        del kept
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return len(gc.get_objects()), sys.getallocatedblocks(), resident

    before = steps(100)  # caches fill; the plan at the end is as large as at the end of what follows
    first, second = steps(count), steps(count)
    # a leak shows both times, and what others have left behind only once
    objects, blocks, resident = (min(b - a, c - b) for a, b, c in zip(before, first, second, strict=True))
    assert objects < 30
    assert blocks < count  # one that is kept in every step would be as many
    assert resident < 8 << 20  # what was freed is not always given back


@on("two")
def test_what_is_counted_is_the_part_that_is_here():
    param = parameter(torch.ones(6, 4), mesh_of(2), S0)
    param.grad = torch.ones_like(param)
    optimizer = OPTIMIZERS["AdamW"]([param])
    optimizer.step()
    assert "\nState: 100 bytes (" in repr(optimizer)  # two moments of 12 elements, and the step
    lines = {line.split()[0]: line.split()[1:] for line in optimizer.memory_summary().splitlines() if line}
    assert lines["parameters"] == lines["gradients"] == lines["exp_avg"] == ["float32", "1", "12", "48", "bytes"]


def times(optimizer: str, count: int = 1000, rounds: int = 30) -> tuple[float, float]:
    """Seconds of processor time of step() on divided and on plain parameters, in turns: whatever else the machine does
    meets both."""
    mesh = mesh_of(1)
    plain = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(count)]
    parts = [parameter(torch.ones(4, 4), mesh, S0) for _ in range(count)]
    both = [OPTIMIZERS[optimizer](params) for params in (parts, plain)]
    for p in (*plain, *parts):
        p.grad = torch.ones_like(p)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for opt, seconds in zip(both, found, strict=True):
            begun = time.process_time()
            opt.step()
            seconds.append(time.process_time() - begun)
    assert all(torch.equal(here(p), q) for p, q in zip(parts, plain, strict=True))
    return min(found[0]), min(found[1])


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamP", "BertAdam over all"])
def test_host_time_of_a_thousand_parameters(one, optimizer):
    """A loose bound, for noisy machines."""
    ((divided_time, plain_time),) = one.run(times, optimizer)
    print(f"{optimizer}: {1e3 * divided_time:.2f} ms, {divided_time / plain_time:.2f} times the plain step")
    assert divided_time < 4 * plain_time
