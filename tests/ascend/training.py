"""Parameters, and training them with gradients that are the same every time."""

from __future__ import annotations

import itertools

import torch

from tests.support import F32, F64

SHAPES = [(4, 6), (7,), (3, 2, 3), ()]


def leaves(dtypes=(F32,), shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator) for s in shapes]
    return [torch.nn.Parameter(v.to(d)) for v, d in zip(values, itertools.cycle(dtypes), strict=False)]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_grads(params, step, missing=()):
    generator = torch.Generator().manual_seed(100 + step)
    for k, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator, dtype=F64).to(p)
        p.grad = None if k in missing else grad


def train(optimizer, steps=4, start=0, missing=lambda step: ()):
    for step in range(start, start + steps):
        set_grads(params_of(optimizer), step, missing(step))
        optimizer.step()
    return optimizer


def tensors(optimizer):
    params = params_of(optimizer)
    return [p.detach() for p in params], [dict(optimizer.state.get(p, {})) for p in params]


def assert_same(one, other, **tolerance):
    """Bit for bit, unless told otherwise."""
    torch.testing.assert_close(tensors(one), tensors(other), **tolerance or {"rtol": 0, "atol": 0})
