"""Every optimizer, parameters, training with reproducible gradients, and comparison to the bit."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch

import fusedadam
from tests.support import F32, F64

SHAPES = [(4, 6), (7,), (3, 2, 3), ()]
PLAIN = {
    "AdamW": functools.partial(fusedadam.AdamW, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "Adam": functools.partial(fusedadam.Adam, lr=1e-2, weight_decay=0.1, maximize=True),
    "EmaAdamW": functools.partial(fusedadam.EmaAdamW, lr=1e-2, weight_decay=0.1, ema_decay=0.9),
    "AdamP": functools.partial(fusedadam.AdamP, lr=1e-2, weight_decay=0.1, delta=0.5),
    "BertAdam": functools.partial(fusedadam.BertAdam, lr=1e-2, warmup=0.3, t_total=20),
}
CLIPPED = {
    "AdamW clipped": functools.partial(fusedadam.AdamW, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "Adam clipped": functools.partial(fusedadam.Adam, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "EmaAdamW clipped": functools.partial(fusedadam.EmaAdamW, lr=1e-2, max_grad_norm=1.0),
    "AdamP clipped": functools.partial(fusedadam.AdamP, lr=1e-2, nesterov=True, max_grad_norm=1.0),
    "BertAdam by group": functools.partial(fusedadam.BertAdam, lr=1e-2, clip="group"),
    "BertAdam over all": functools.partial(fusedadam.BertAdam, lr=1e-2, clip="all"),
}
# Beyond Adam. What is tested here is the base's, so the quick tests take some: one whose first step is special, one
# with a state that begins at one, two that sum, and two with states smaller than their parameters.
QUICK = ("SGD", "RMSpropTF", "Lamb", "AdamW that holds back", "NAdam", "Adafactor")
REST_PLAIN = {
    "SGD": functools.partial(fusedadam.SGD, lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "RMSprop": functools.partial(fusedadam.RMSprop, lr=1e-2, momentum=0.9, centered=True, weight_decay=0.1),
    "RMSpropTF": functools.partial(fusedadam.RMSpropTF, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Adadelta": functools.partial(fusedadam.Adadelta, lr=0.5, weight_decay=0.1, maximize=True),
    "Lamb": functools.partial(fusedadam.Lamb, lr=1e-2, weight_decay=0.1),
    "RAdam": functools.partial(fusedadam.RAdam, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
    "NAdam": functools.partial(fusedadam.NAdam, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
    "Adafactor": functools.partial(fusedadam.Adafactor, lr=5e-2, weight_decay=0.1),
    "Adan": functools.partial(fusedadam.Adan, lr=1e-2, weight_decay=0.1),
    "AdEMAMix": functools.partial(fusedadam.AdEMAMix, lr=1e-2, weight_decay=0.1, alpha_warmup=4),
    "ScheduleFreeAdamW": functools.partial(fusedadam.ScheduleFreeAdamW, lr=1e-2, warmup_steps=4, weight_decay=0.1),
    "Lion": functools.partial(fusedadam.Lion, lr=1e-2, weight_decay=0.1),
}
REST_CLIPPED = {
    "SGD clipped": functools.partial(fusedadam.SGD, lr=1e-2, momentum=0.9, nesterov=True, max_grad_norm=1.0),
    "RMSprop clipped": functools.partial(fusedadam.RMSprop, lr=1e-2, max_grad_norm=1.0),
    "Adadelta clipped": functools.partial(fusedadam.Adadelta, max_grad_norm=1.0),
    "Lamb clipped": functools.partial(fusedadam.Lamb, lr=1e-2, max_grad_norm=1.0),
    "RAdam clipped": functools.partial(fusedadam.RAdam, decoupled_weight_decay=True, max_grad_norm=1.0),
    "NAdam clipped": functools.partial(fusedadam.NAdam, decoupled_weight_decay=True, max_grad_norm=1.0),
    "Adafactor clipped": functools.partial(fusedadam.Adafactor, eps=(1e-3, 1e-3), max_grad_norm=1.0),
    "Adan clipped": functools.partial(fusedadam.Adan, no_prox=True, max_grad_norm=1.0),
    "AdEMAMix clipped": functools.partial(fusedadam.AdEMAMix, lr=1e-2, max_grad_norm=1.0),
    "ScheduleFreeAdamW clipped": functools.partial(fusedadam.ScheduleFreeAdamW, lr=1e-2, max_grad_norm=1.0),
    "Lion clipped": functools.partial(fusedadam.Lion, lr=1e-2, max_grad_norm=1.0),
    "AdamW that holds back": functools.partial(fusedadam.AdamW, lr=1e-2, cautious=True, update_clipping=True),
    "Lion that holds back": functools.partial(fusedadam.Lion, lr=1e-2, cautious=True, max_grad_norm=1.0),
    "Lamb by the global norm": functools.partial(fusedadam.Lamb, lr=1e-2, use_global_grad_norm=True),
}
MAKERS = PLAIN | CLIPPED | REST_PLAIN | REST_CLIPPED


def rows(makers):
    rest = REST_PLAIN | REST_CLIPPED
    return [
        pytest.param(make, id=name, marks=[pytest.mark.exhaustive] * (name in rest and name not in QUICK))
        for name, make in makers.items()
    ]


EVERY = pytest.mark.parametrize("make", rows(MAKERS))
EVERY_PLAIN = pytest.mark.parametrize("make", rows(PLAIN | REST_PLAIN))


def leaves(shapes=SHAPES, dtypes=(F32,), seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=generator, dtype=F64) for s in shapes]
    return [torch.nn.Parameter(v.to(device, d)) for v, d in zip(values, itertools.cycle(dtypes), strict=False)]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


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
