"""Every optimizer in every storage format: saved and resumed, copied, skipped, without gradients, and in backward.

Whatever happens in between, training gives the bits of a run in which it did not. The eager backend compiles nothing.
tests/distributed/test_every_checkpoint.py resumes the same optimizers and formats sharded.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch

import fusedadam
from fusedadam.catalog import CATALOG
from fusedadam.contract.storage import PRESETS
from tests.contract.common import EVERY_FIRST, assert_same, leaves, params_of, saved_and_loaded, set_grads, train
from tests.support import BF16, F32

SHAPES = [(64, 64), (5,), (3, 2)]  # the first in blocks, where the format has any
FORMATS = [None, *PRESETS]
CASES = [
    pytest.param(make, storage, id=f"{name}-{storage}") for name, make in EVERY_FIRST.items() for storage in FORMATS
]
EVERY = pytest.mark.parametrize(("make", "storage"), CASES)


def test_the_matrix_is_whole():
    assert len(CASES) == len(CATALOG) * len(FORMATS) >= 17 * 4


def made(make, storage, params=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # states in bfloat16, as the parameters
        params = leaves(SHAPES, [F32 if storage is None else BF16]) if params is None else params
        return make(params, storage=storage, backend="eager", **options)


@EVERY
def test_resumed_from_a_file(make, storage):
    """Noise goes on, too: its seed is in the state dict."""
    original = train(made(make, storage, seed=5), 2)
    params, saved = saved_and_loaded([params_of(original), original.state_dict()])
    resumed = made(make, storage, params)
    resumed.load_state_dict(saved)
    assert_same(train(resumed, 2, start=2), train(original, 2, start=2))


@EVERY
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copied(make, storage, copied):
    original = train(made(make, storage), 2)
    again = copied(original)
    assert_same(train(again, 2, start=2), train(original, 2, start=2))
    assert not {*params_of(again)} & {*params_of(original)}


@EVERY
@pytest.mark.parametrize("how", ["GradScaler", "skip_nonfinite"])
def test_a_skipped_first_step(make, storage, how):
    skipping = made(make, storage, skip_nonfinite=how == "skip_nonfinite")
    set_grads(params_of(skipping), 50)
    params_of(skipping)[1].grad[2] = math.inf
    if how == "GradScaler":
        skipping.grad_scale, skipping.found_inf = torch.ones(()), torch.ones(())
    skipping.step()
    if how == "GradScaler":
        del skipping.grad_scale, skipping.found_inf
    assert_same(train(skipping, 2), train(made(make, storage), 2))


@EVERY
def test_missing_gradients(make, storage):
    """Each parameter takes the steps that it has gradients for, as if it were alone."""
    together = made(make, storage)
    alone = [made(make, storage, [copy.deepcopy(param)]) for param in params_of(together)]
    for step in range(4):
        set_grads(params_of(together), step)
        for k, (param, own) in enumerate(zip(params_of(together), alone, strict=True)):
            param.grad = None if (step + k) % 3 == 0 else param.grad
            if param.grad is not None:
                params_of(own)[0].grad = param.grad.clone()
                own.step()
        together.step()
    for param, own in zip(params_of(together), alone, strict=True):
        (single,) = params_of(own)
        assert_same(([param.detach()], [dict(together.state[param])]), ([single.detach()], [dict(own.state[single])]))


@pytest.mark.parametrize(("make", "storage"), [case for case in CASES if case.values[0].func is not fusedadam.Muon])
def test_in_backward(make, storage):
    """But for Muon, which is refused there: tests/test_in_backward.py."""
    models = [torch.nn.ParameterList(leaves(SHAPES, [F32 if storage is None else BF16])) for _ in range(2)]
    plain = made(make, storage, models[0].parameters())
    early = fusedadam.step_in_backward(models[1], lambda params: made(make, storage, params))
    for _ in range(3):
        for model in models:
            sum((p.float() ** 2).sum() for p in model).backward()
        plain.step()
        early.step()
        plain.zero_grad()
    assert_same(plain, early)
    assert all(early.state[param]["step"] == 3 for param in models[1])
