"""States that begin as copies of their parameters follow them until a step is counted."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fusedadam
from fusedadam.ascend.mindspeed import FusedEmaAdamW
from fusedadam.contract import copies
from fusedadam.tensors.transfer import NOT_YET
from tests.contract.common import assert_same, params_of, set_grads, train
from tests.support import BF16, F32

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COPYING = pytest.mark.parametrize("cls", [fusedadam.ScheduleFreeAdamW, fusedadam.EmaAdamW])


def made(cls, value, dtype=F32, device="cpu", **options):
    params = [torch.nn.Parameter(torch.full(shape, value, dtype=dtype, device=device)) for shape in ((64, 64), (5,))]
    return cls(params, lr=1e-2, **options)


def skip_a_step(optimizer, how="found_inf"):
    set_grads(params_of(optimizer), 50)
    if how == "skip_nonfinite":
        params_of(optimizer)[0].grad.view(-1)[-1] = math.inf
        optimizer.step()
        return
    device = params_of(optimizer)[0].device
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    del optimizer.found_inf


def write(optimizer, value):
    with torch.no_grad():
        for param in params_of(optimizer):
            param.fill_(value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "storage"), [(F32, None), (BF16, "exact"), (BF16, "8bit")])
@pytest.mark.parametrize("how", ["skip_nonfinite", "found_inf"])
@COPYING
def test_weights_written_after_skipped_first_steps_are_trained(cls, how, dtype, storage, device):
    """The copies had been made before the step was known to be skipped, and the old weights came back."""
    options = {"storage": storage, "skip_nonfinite": how == "skip_nonfinite"}
    optimizer, plain = (made(cls, value, dtype, device, **options) for value in (1.0, 5.0))
    skip_a_step(optimizer, how)
    skip_a_step(optimizer, how)
    write(optimizer, 5.0)
    # found_inf takes step counts to the device, where they stay
    assert_same(train(optimizer, 3), train(plain, 3), rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize("between", ["deepcopy", "pickle", "state dict", "refused load"])
@COPYING
def test_that_holds_for_copies_and_pickles_and_after_state_dicts(cls, between):
    optimizer, plain = made(cls, 1.0), made(cls, 5.0)
    skip_a_step(optimizer)
    if between == "deepcopy":
        optimizer = copy.deepcopy(optimizer)
    elif between == "pickle":
        optimizer = pickle.loads(pickle.dumps(optimizer))
    elif between == "state dict":
        write(optimizer, 3.0)
        name = "z" if cls is fusedadam.ScheduleFreeAdamW else "ema_params"
        assert all(state[name].eq(3.0).all() for state in optimizer.state_dict()["state"].values())
    else:

        def refuse(_):
            raise OverflowError

        handle = optimizer.register_load_state_dict_post_hook(refuse)
        with pytest.raises(OverflowError):
            optimizer.load_state_dict(optimizer.state_dict())
        handle.remove()
    write(optimizer, 5.0)
    assert_same(train(optimizer, 3), train(plain, 3))


@COPYING
def test_weights_written_after_a_checkpoint_created_states_and_the_first_step_was_skipped(cls):
    model = torch.nn.Linear(4, 3)
    optimizer = cls(model.parameters(), lr=1e-2)
    get_optimizer_state_dict(model, optimizer)
    skip_a_step(optimizer)
    write(optimizer, 5.0)
    other = copy.deepcopy(model)
    assert_same(train(optimizer, 2), train(cls(other.parameters(), lr=1e-2), 2))


@COPYING
def test_a_parameter_whose_first_gradient_comes_later(cls):
    optimizer, plain = made(cls, 1.0), made(cls, 1.0)
    for each in (optimizer, plain):
        set_grads(params_of(each)[:1], 0)
        each.step()
    skip_a_step(optimizer)
    for each in (optimizer, plain):
        with torch.no_grad():
            params_of(each)[1].fill_(5.0)
    assert_same(train(optimizer, 3), train(plain, 3))


def test_a_copy_that_begins_after_many_steps():
    """As an average that is added to AdamW's states: the count of its parameter is not zero."""
    given = train(made(fusedadam.AdamW, 1.0), 3).state_dict()
    optimizer, plain = made(fusedadam.EmaAdamW, 1.0), made(fusedadam.EmaAdamW, 5.0)
    for each in (optimizer, plain):
        with pytest.warns(UserWarning, match="no ema_params"):
            each.load_state_dict(given)
    skip_a_step(optimizer)
    write(optimizer, 5.0)
    assert_same(train(optimizer, 3), train(plain, 3))


@COPYING
def test_a_copy_that_was_loaded_is_kept_at_any_count(cls):
    """Someone who sets counts back to zero, to begin a warm-up again, wants the average that there is."""
    given = copy.deepcopy(train(made(cls, 1.0), 3).state_dict())
    for state in given["state"].values():
        state["step"].zero_()
    name = "z" if cls is fusedadam.ScheduleFreeAdamW else "ema_params"
    optimizer = made(cls, 9.0)
    optimizer.load_state_dict(given)
    skip_a_step(optimizer)
    assert torch.equal(optimizer.state[params_of(optimizer)[0]][name], given["state"][0][name])


@COPYING
def test_until_a_devices_answer_arrives_the_device_decides(cls, monkeypatch):
    """As with a GradScaler on a GPU that is many steps behind: a step that was counted ends the following."""
    monkeypatch.setattr(copies, "requested", lambda numbers: torch.full_like(numbers, NOT_YET))
    optimizer, plain = made(cls, 1.0), made(cls, 5.0)
    skip_a_step(optimizer)
    write(optimizer, 5.0)
    for each in (optimizer, plain):
        train(each, 2)
        write(each, 7.0)
        train(each, 2, start=2)
    assert_same(optimizer, plain)
    assert optimizer._copies.params
    assert optimizer._copies._requested[0][1].eq(NOT_YET).all()
    optimizer._copies._requested[0][1].fill_(1.0)  # it arrives
    assert_same(train(optimizer, 1, start=4), train(plain, 1, start=4))
    assert not optimizer._copies.params


def test_averages_are_those_of_the_weights_before_the_first_step():
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = FusedEmaAdamW(model.parameters())
    skip_a_step(optimizer)
    write(optimizer, 5.0)
    with optimizer.ema_weights():
        assert model.weight.eq(5.0).all()
    write(optimizer, 6.0)
    assert optimizer.ema_state_dict(model)["weight"].eq(6.0).all()
    write(optimizer, 7.0)
    optimizer.copy_to()
    assert model.weight.eq(7.0).all()


@pytest.mark.gpu
@COPYING
def test_the_host_does_not_wait_to_know_whether_a_step_was_counted(cls):
    optimizer, plain = (made(cls, value, device="cuda", skip_nonfinite=True) for value in (1.0, 5.0))
    skip_a_step(optimizer, "skip_nonfinite")
    write(optimizer, 5.0)
    grads = [[torch.randn_like(p) for p in params_of(optimizer)] for _ in range(4)]
    for each in (plain, optimizer):
        for k, values in enumerate(grads):
            for param, grad in zip(params_of(each), values, strict=True):
                param.grad = grad
            torch.cuda.set_sync_debug_mode("error" if each is optimizer and k > 0 else "default")
            try:
                each.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert_same(optimizer, plain)


def test_a_step_asks_only_about_the_parameters_that_took_part(monkeypatch):
    """A checkpoint makes the states of all; most may never get a gradient again."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(4)]
    for p in params:
        p.grad = torch.zeros(3)
    optimizer = fusedadam.EmaAdamW(params, skip_nonfinite=True)
    params[0].grad.fill_(torch.inf)
    optimizer.step()
    assert len(optimizer._copies.params) == 4
    asked = []
    monkeypatch.setattr(copies, "requested", lambda answers: asked.append(len(answers)) or answers)
    for p in params:
        p.grad = None
    params[1].grad = torch.ones(3)
    for _ in range(3):
        optimizer.step()
    assert asked == [1], "once, about one, which has been counted"
