"""Ctrl-C and a lack of memory during a step: values stay consistent, and the optimizer stays usable.

The promise. An exception may end a step at any point.

- If the step has not been counted, no parameter, moment or average has changed. (States that were missing may have been
  created, with their initial values.)
- If it has been counted, then for all parameters, and each tensor holds its old or its new value. A compiled kernel
  always finishes: where an optimizer needs only one (no norms, no gaps in the tensors), all tensors of one device and
  mix of dtypes are old, or all are new.
- Either way, the next step does the same as that of a new optimizer which loads the state dict.
- The step that failed keeps no gradients alive.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import fusedadam
from tests.contract.common import leaves, params_of, set_grads
from tests.faults.consistency import assert_old_or_new, assert_same_values, reloaded, values
from tests.faults.interrupting import check_everywhere, interrupted, points
from tests.support import F32, F64

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
MAKERS = {
    "AdamW": functools.partial(fusedadam.AdamW, **OPTIONS),
    "EmaAdamW": functools.partial(fusedadam.EmaAdamW, ema_decay=0.9, **OPTIONS),
    "AdamP clipped": functools.partial(fusedadam.AdamP, max_grad_norm=1.0, **OPTIONS),
    "Muon": functools.partial(fusedadam.Muon, use_muon=None, **OPTIONS),
}
ROOT = Path(__file__).parents[2]
ONE_KERNEL = ("AdamW", "EmaAdamW")
SHAPES = [(4, 6), (7,), (3, 2, 3), ()]
MOST = 60  # points at which a step is interrupted, unless the tests are to be exhaustive


def with_gaps(params):
    """The same parameters, of which every other element of memory belongs to someone else."""
    return [torch.nn.Parameter(torch.stack([p.detach(), p.detach()], dim=-1)[..., 0]) for p in params]


def replace_grads(params, step):
    """New gradients elsewhere; the old ones are kept, so that a step that still reads them is found out."""
    old = [p.grad for p in params]
    set_grads(params, step)
    return old


class Scene:
    """An optimizer that is about to step, in a situation that is made anew for every interruption."""

    def __init__(self, make, situation, **options):
        self.make, self.situation, self.options = make, situation, options

    def __call__(self):
        params = leaves(SHAPES, dtypes=(F32, F64))
        params = with_gaps(params) if "gaps" in self.situation else params
        optimizer = self.make(params, **self.options)
        if "first" in self.situation:
            set_grads(params, 0)
            return optimizer
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
        if "moved" in self.situation:
            optimizer.old = replace_grads(params, 2)
        elif "missing" in self.situation:
            set_grads(params, 2)
            params[1].grad = None
        else:
            for p in params:
                p.grad.mul_(0.5)
        return optimizer


@functools.cache
def undisturbed(scene):
    """The values before and after a step that nothing interrupts."""
    optimizer = scene()
    before = values(optimizer)
    optimizer.step()
    return before, values(optimizer)


def check_step(scene, together, at, finely=False):
    """One step, interrupted there, and the next."""
    optimizer = scene()
    where = interrupted(optimizer.step, at, finely)
    now = values(optimizer)
    assert_old_or_new(now, *undisturbed(scene), together, where)
    other = reloaded(optimizer, functools.partial(scene.make, **scene.options))
    assert_same_values(values(optimizer), now, f"{where}: saving has changed something")
    optimizer.step()
    other.step()
    assert_same_values(values(optimizer), values(other), f"{where}: the next step")


SITUATIONS = ("first", "later", "later, moved", "later, missing", "later, gaps")
SOME = [
    ("AdamW", "later, moved", "numba", None),  # all lines
    ("AdamW", "first", "numba", MOST),
    ("EmaAdamW", "later, missing", "numba", MOST),
    ("EmaAdamW", "later, gaps", "numba", MOST),
    ("AdamP clipped", "first", "numba", MOST),
    ("AdamP clipped", "later", "numba", MOST),
    ("AdamP clipped", "later, gaps", "numba", MOST),
    ("AdamP clipped", "later", "eager", MOST),
]
ALL = [(*case, None) for case in itertools.product(MAKERS, SITUATIONS, ("numba", "eager"))]


def scene_of(name, situation, backend="numba"):
    together = name in ONE_KERNEL and backend == "numba" and "gaps" not in situation
    scene = Scene(MAKERS[name], situation, backend=backend)
    scene().step()  # kernels are compiled, which takes long and is not what is interrupted here
    return scene, together


@pytest.mark.parametrize(
    ("name", "situation", "backend", "most"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ALL if case not in SOME)],
)
def test_an_interrupted_step(name, situation, backend, most):
    scene, together = scene_of(name, situation, backend)
    check_everywhere(functools.partial(check_step, scene, together), points(scene().step, most))


@pytest.mark.exhaustive
@pytest.mark.parametrize("situation", ["later", "later, gaps"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_that_is_interrupted_at_every_instruction(name, situation):
    scene, together = scene_of(name, situation)
    check = functools.partial(check_step, scene, together, finely=True)
    check_everywhere(check, points(scene().step, finely=True))


def check_nothing_is_kept(scene, at):
    optimizer = scene()
    grads = [weakref.ref(p.grad) for p in params_of(optimizer) if p.grad is not None]
    where = interrupted(optimizer.step, at)
    for p in params_of(optimizer):
        p.grad = None
    if any(grad() is not None for grad in grads):
        gc.collect()
    assert not any(grad() is not None for grad in grads), f"{where}: gradients are kept alive"


@pytest.mark.parametrize(
    ("name", "situation", "backend", "most"),
    [
        ("AdamW", "first", "numba", MOST),
        ("AdamP clipped", "later", "numba", MOST),
        ("AdamW", "later, gaps", "numba", None),
        ("AdamW", "later", "eager", None),
    ],
)
def test_a_step_that_fails_keeps_no_gradients(name, situation, backend, most):
    scene, _ = scene_of(name, situation, backend)
    check_everywhere(functools.partial(check_nothing_is_kept, scene), points(scene().step, most))


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n != "EmaAdamW")) for n in MAKERS])
def test_real_signals(name):
    """They come between any two instructions, and while kernels run."""
    command = [sys.executable, "-m", "tests.faults.under_signals", name, "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5, "it was hardly ever interrupted"
