"""Saving and loading: a resumed run is the uninterrupted one, and nothing is shared."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.contract.common import (
    EVERY,
    assert_same,
    assert_unchanged,
    copies_of,
    everything,
    leaves,
    saved_and_loaded,
    tensors,
    train,
)
from tests.contract.test_conversion import ours_with
from tests.support import BF16, F16, F32, F64

# the plain one compiled; the others eagerly, which saves compiling a kernel for each of them
KEPT = [((F32,), None, None), ((BF16,), F32, "eager"), ((F32,), BF16, "eager"), ((F16, F32), None, "eager")]


@EVERY
@pytest.mark.parametrize(("dtypes", "kept", "backend"), [*KEPT, ((BF16,), F64, "eager")], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit_in_the_dtypes_it_had(make, dtypes, kept, backend):
    """torch casts states to the parameter's dtype when it loads them."""
    straight = train(make(leaves(dtypes=dtypes), state_dtype=kept, backend=backend), 6)
    first = train(make(leaves(dtypes=dtypes), state_dtype=kept, backend=backend), 2)
    given, weights = saved_and_loaded((first.state_dict(), tensors(first)[0]))
    second = make([torch.nn.Parameter(w) for w in weights], backend=backend)  # the dtypes are in the state dict
    second.load_state_dict(given)
    assert_same(second, first)
    train(second, 4, start=2)
    assert_same(second, straight)


@EVERY
def test_a_resume_before_every_step_and_a_second_one_without_a_step_change_nothing(make):
    straight, optimizer = train(make(leaves()), 4), make(leaves())
    for step in range(4):
        for _ in range(2):  # the second time before any step
            again = make(copies_of(optimizer))
            again.load_state_dict(saved_and_loaded(optimizer.state_dict()))
            optimizer = again
        train(optimizer, 1, start=step)
    assert_same(optimizer, straight)


@EVERY
def test_nothing_is_shared_with_what_was_loaded_from(make):
    """Neither tensors, nor groups, nor a tensor lr in them."""
    first = make(leaves())
    first.param_groups[0]["lr"] = torch.tensor(1e-2)
    train(first, 2)
    given = first.state_dict()
    second = make(leaves())
    second.load_state_dict(given)
    loaded = everything(second)
    for state in given["state"].values():
        for value in state.values():
            value.fill_(7.0)
    given["param_groups"][0]["lr"].fill_(9.0)
    given["param_groups"][0]["weight_decay"] = 3.0
    given["param_groups"].append("rubbish")
    given["state"].clear()
    assert_unchanged(second, loaded)

    third = make(leaves())
    third.load_state_dict(second.state_dict())
    before = everything(third)
    train(second, 2)
    second.param_groups[0]["lr"].fill_(5.0)
    assert_unchanged(third, before)
    before = everything(second)
    train(third, 2)
    assert_unchanged(second, before)


def test_states_keep_their_dtype_whatever_this_side_would_have_chosen():
    given = train(fusedadam.AdamW(leaves(dtypes=[BF16]), state_dtype=F32), 2).state_dict()
    given["param_groups"][0]["state_dtype"] = None
    ours = train(ours_with(fusedadam.AdamW, leaves(dtypes=[BF16]), given), 1)
    assert {v.dtype for state in ours.state.values() for v in state.values()} == {F32}


def test_options_that_a_checkpoint_does_not_have_stay():
    params = [torch.nn.Parameter(torch.ones(3))]
    theirs = torch.optim.AdamW(params)
    ours = fusedadam.EmaAdamW([{"params": params, "ema_decay": 0.5}], state_dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["ema_decay"] == 0.5
    assert ours.param_groups[0]["state_dtype"] == torch.float64


def test_the_backend_is_this_sides():
    given = train(fusedadam.AdamW(leaves(), backend="eager"), 1).state_dict()
    ours = fusedadam.AdamW(leaves(), backend="numba")
    ours.load_state_dict(given)
    assert ours.param_groups[0]["backend"] == "numba"
