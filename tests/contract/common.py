"""Every optimizer, parameters, training with reproducible gradients, and comparison to the bit."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch

from fusedadam.catalog import CATALOG
from tests.support import F32, F64

SHAPES = [(4, 6), (7,), (3, 2, 3), ()]
MATRICES = [(4, 6), (7, 3), (5, 5), (2, 9)]
MAKERS = {name: make for entry in CATALOG.values() for name, make in entry.tested.items()}
EVERY_FIRST = {name: MAKERS[name] for name in CATALOG}
PLAIN = {entry.name: MAKERS[entry.name] for entry in CATALOG.values() if entry.core}
# by a norm of several parameters
CLIPPED = {
    name: make for entry in CATALOG.values() if entry.core for name, make in entry.tested.items()
    if make.keywords.get("max_grad_norm") or "clip" in make.keywords
}  # fmt: skip
# What is tested here is the base's: quick tests take what differs in its states or sums.
QUICK = {name for entry in CATALOG.values() if entry.core for name in entry.tested}
QUICK |= {entry.name for entry in CATALOG.values() if entry.quick}


def rows(makers):
    assert makers
    return [
        pytest.param(make, id=name, marks=[pytest.mark.exhaustive] * (name not in QUICK))
        for name, make in makers.items()
    ]


EVERY = pytest.mark.parametrize("make", rows(MAKERS))
EVERY_PLAIN = pytest.mark.parametrize("make", rows(EVERY_FIRST))


def leaves(shapes=SHAPES, dtypes=(F32,), seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=generator, dtype=F64) for s in shapes]
    return [torch.nn.Parameter(v.to(device, d)) for v, d in zip(values, itertools.cycle(dtypes), strict=False)]


def leaves_of(name, **more):
    """Parameters that both torch's optimizer of this name and ours take."""
    return leaves(MATRICES if CATALOG[name].matrices else SHAPES, **more)


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def copies_of(optimizer):
    """Its parameters as they are now, for another optimizer."""
    return [torch.nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, map_location="cpu")


def set_grads(params, step, scale=1.0):
    """Other gradients in every step, the same in every run."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator, dtype=F64) * scale).to(p)


def train(optimizer, steps, start=0):
    for step in range(start, start + steps):
        set_grads(params_of(optimizer), step)
        optimizer.step()
    return optimizer


def tensors(optimizer):
    """Parameters and states, in the order of the parameters."""
    params = params_of(optimizer)
    return [p.detach() for p in params], [dict(optimizer.state.get(p, {})) for p in params]


def assert_same(one, other, **tolerance):
    """Bit for bit and in the same dtypes, unless told otherwise."""
    ours, theirs = (tensors(o) if isinstance(o, torch.optim.Optimizer) else o for o in (one, other))
    torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerance or {"rtol": 0, "atol": 0})


def everything(optimizer):
    """A copy of all that must stay as it is when something is refused or skipped, comparable with ``assert_same``."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    positions = {p: k for k, p in enumerate(params_of(optimizer))}
    states = {positions[p]: dict(state) for p, state in optimizer.state.items()}
    held = [p.detach() for p in params_of(optimizer)], states, [p.grad for p in params_of(optimizer)]
    return copy.deepcopy((held, groups))


def assert_unchanged(optimizer, before):
    (now, groups), (held, options) = everything(optimizer), before
    torch.testing.assert_close(now, held, rtol=0, atol=0, equal_nan=True)
    assert groups == options


class Small(torch.nn.Module):
    """A model with a matrix, a vector and a parameter of four dimensions, and a loss that depends on all."""

    def __init__(self, dtype=F32):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(2, 3, 2, dtype=dtype)
        self.norm = torch.nn.LayerNorm(12, dtype=dtype)
        self.last = torch.nn.Linear(12, 4, dtype=dtype)

    def forward(self, x):
        return self.last(self.norm(self.convolution(x).flatten(1))).square().mean()


def batch(step, dtype=F32):
    return torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(step), dtype=F64).to(dtype)
