"""Parameters, and training them with reproducible gradients."""

from __future__ import annotations

import itertools

import torch

from tests.contract.common import SHAPES, params_of, tensors
from tests.support import F32, F64


def leaves(dtypes=(F32,), shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator) for s in shapes]
    return [torch.nn.Parameter(v.to(d)) for v, d in zip(values, itertools.cycle(dtypes), strict=False)]


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


def assert_same(one, other, **tolerance):
    """Bit for bit, unless told otherwise."""
    torch.testing.assert_close(tensors(one), tensors(other), **tolerance or {"rtol": 0, "atol": 0})
