"""``skip_nonfinite=True``: a step with a gradient that is not finite changes nothing, and is counted."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import fusedadam
from tests.contract.common import EVERY, SHAPES, assert_same, assert_unchanged, everything, leaves, params_of, set_grads
from tests.support import BF16, F32

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@EVERY
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_everything_stays_as_it_was_and_training_goes_on(make, bad):
    skipping, plain = make(leaves(), skip_nonfinite=True), make(leaves())
    for step in range(6):
        set_grads(params_of(skipping), step)
        if step in (2, 3):
            params_of(skipping)[step - 1].grad.view(-1)[-1] = bad
            before = everything(skipping)
            skipping.step()
            assert_unchanged(skipping, before)
            continue
        set_grads(params_of(plain), step)
        for optimizer in (skipping, plain):
            optimizer.step()
    assert_same(skipping, plain)
    assert (skipping.skipped_steps, plain.skipped_steps) == (2, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", [None, "8bit"])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_noise_and_step_counts_too(device, storage, backend):
    def made():
        shapes = [(64, 64), (40,)]
        params = [torch.nn.Parameter(torch.ones(shape, dtype=BF16, device=device)) for shape in shapes]
        return params, fusedadam.AdamW(params, storage=storage, skip_nonfinite=True, backend=backend)

    (params, skipping), (others, plain) = made(), made()
    for step in range(5):
        grads = [torch.linspace(-1, 1 + step, p.numel(), device=device).view_as(p).to(BF16) for p in params]
        if step == 2:
            grads[1][3] = math.nan
        for (parameters, optimizer), is_left_out in (((params, skipping), False), ((others, plain), step == 2)):
            for param, grad in zip(parameters, grads, strict=True):
                param.grad = grad
            if not is_left_out:
                optimizer.step()
    assert all(map(torch.equal, params, others))
    assert all(
        torch.equal(value.float(), other.float())
        for p, q in zip(params, others, strict=True)
        for value, other in zip(skipping.state[p].values(), plain.state[q].values(), strict=True)
    )
    assert skipping.skipped_steps == 1


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    params = [torch.nn.Parameter(torch.ones(shape, device="cuda")) for shape in SHAPES]
    optimizer = fusedadam.AdamW(params, skip_nonfinite=True)
    set_grads(params, 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    params[0].grad.fill_(math.inf)
    optimizer.step()
    assert optimizer.skipped_steps == 1


def test_largest_finite_numbers_and_empty_gradients_are_taken():
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0)), torch.nn.Parameter(torch.ones(2))]
    params[0].grad, params[1].grad = torch.full((3,), torch.finfo(F32).max), torch.ones(0)
    optimizer = fusedadam.SGD(params, lr=1e-40, skip_nonfinite=True)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert optimizer.state[params[0]]["step"] == 1


def test_a_grad_scaler_that_has_looked_is_believed():
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = fusedadam.AdamW([param], skip_nonfinite=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    assert param.tolist() == [1.0, 1.0]
    assert optimizer.skipped_steps == 1


def test_gradients_that_change_after_a_grad_scaler_has_looked_are_seen():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = fusedadam.AdamW([param], skip_nonfinite=True), torch.amp.GradScaler("cpu")
    for bad in (math.nan, None, math.inf):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        if bad == math.inf:
            param.grad.fill_(bad)  # before: only the scaler finds it
        scaler.unscale_(optimizer)
        if bad == math.inf:
            param.grad.fill_(1.0)
        elif bad is not None:
            param.grad.fill_(bad)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.skipped_steps == 2
    assert optimizer.state[param]["step"] == 1
    assert param.isfinite().all()


def test_gradients_of_unknown_dtypes_are_refused_by_name():
    param = torch.nn.Parameter(torch.ones(2))
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this torch has gradients of the parameter's dtype alone")
    param.grad_dtype = None
    param.grad = torch.ones(2).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="grad has dtype float8_e4m3fn"):
        fusedadam.AdamW([param], skip_nonfinite=True).step()


def test_one_group_is_enough_and_it_may_be_switched_off():
    first, second = leaves()[:2]
    optimizer = fusedadam.AdamW([{"params": [first], "skip_nonfinite": True}, {"params": [second]}])
    set_grads([first, second], 0)
    optimizer.step()
    second.grad.fill_(math.nan)
    before = everything(optimizer)
    optimizer.step()
    assert_unchanged(optimizer, before)
    optimizer.param_groups[0]["skip_nonfinite"] = False
    optimizer.step()
    assert second.isnan().all()
    assert optimizer.skipped_steps == 1


def test_where_a_process_does_not_see_everything_it_is_refused():
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="leave skip_nonfinite out"):
        fusedadam.step_in_backward(model, lambda params: fusedadam.AdamW(params, skip_nonfinite=True))
    param = torch.nn.Parameter(torch.ones(2))
    param._fsdp_flattened, param.grad = True, torch.ones(2)
    with pytest.raises(ValueError, match=r"skip_nonfinite=True.*FullyShardedDataParallel"):
        fusedadam.AdamW([param], skip_nonfinite=True).step()
    with pytest.raises((TypeError, ValueError), match="skip_nonfinite"):
        fusedadam.AdamW(leaves(), skip_nonfinite="yes")


def test_copies_remember_skipped_steps_and_state_dicts_do_not():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = fusedadam.AdamW([param], skip_nonfinite=True)
    param.grad = torch.full((2,), math.inf)
    optimizer.step()
    copied, unpickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    optimizer.step()
    assert (copied.skipped_steps, unpickled.skipped_steps, optimizer.skipped_steps) == (1, 1, 2)
    loaded = fusedadam.AdamW([torch.nn.Parameter(torch.ones(2))], skip_nonfinite=True)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.skipped_steps == 0
