"""torch.amp on a CPU: the same bits as a plain step."""

from __future__ import annotations

import math

import pytest
import torch

import fusedadam
from tests.contract.common import (
    EVERY,
    EVERY_PLAIN,
    Small,
    assert_same,
    assert_unchanged,
    batch,
    everything,
    leaves,
    params_of,
    set_grads,
    train,
)
from tests.support import F16, F32

SCALE = 1024.0
DTYPES = pytest.mark.parametrize(("dtypes", "backend"), [((F32,), None), ((F16, F32), "eager")], ids=str)


def scaler_of(scale=SCALE, **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, **options)
    scaler.scale(torch.zeros(()))  # makes the scale
    return scaler


def set_scaled_grads(optimizer, step, scale, bad=None):
    set_grads(params_of(optimizer), step, scale)
    if bad is not None:
        params_of(optimizer)[-2].grad.view(-1)[-1] = bad


# GradScaler


@EVERY
@DTYPES
def test_a_scale_that_is_a_power_of_two_changes_no_bit(make, dtypes, backend):
    """Gradients are unscaled in the step; norms that clip are those of the unscaled ones."""
    scale = {(F32,): SCALE}.get(dtypes, 4.0)  # float16 ends at 65,504
    scaled, plain = (make(leaves(dtypes=dtypes), backend=backend) for _ in range(2))
    scaler = scaler_of(scale, growth_interval=2)
    for step in range(5):
        set_scaled_grads(scaled, step, scaler.get_scale())
        scaler.step(scaled)
        scaler.update()
        train(plain, 1, start=step)
        assert_same(scaled, plain)
        if scaled.grad_norm is not None:
            assert torch.equal(scaled.grad_norm, plain.grad_norm)
    assert scaler.get_scale() == 4 * scale
    assert not hasattr(scaled, "grad_scale")


@EVERY
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_a_step_with_an_infinity_changes_nothing_at_all(make, bad):
    """Parameters, moments, average and counts: also in the very first step, where there are none yet."""
    optimizer, untroubled, scaler = make(leaves()), make(leaves()), scaler_of()
    taken = 0
    for step in range(6):
        scale, infinite = scaler.get_scale(), step in (0, 2, 3)
        set_scaled_grads(optimizer, step, scale, bad if infinite else None)
        before = everything(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if infinite:
            (held, options), (old, old_options) = everything(optimizer), before
            assert options == old_options
            assert_same([held[0], held[2]], [old[0], old[2]])
            new = {k: s for k, s in held[1].items() if k not in old[1]}
            assert_same({k: s for k, s in held[1].items() if k in old[1]}, old[1])
            assert all(float(s["step"]) == 0 for s in new.values()), (
                "states may have been made, but nothing was counted"
            )
            assert scaler.get_scale() == scale / 2
        else:
            train(untroubled, 1, start=step)
            taken += 1
    assert_same(optimizer, untroubled)
    assert all(state["step"] == taken == 3 for state in optimizer.state.values())


@EVERY
def test_unscaled_before_the_step_and_clipped_is_the_same_as_never_scaled(make):
    """After ``unscale_`` the step must not unscale once more, nor divide the gradients."""
    scaled, plain, scaler = make(leaves()), make(leaves()), scaler_of()
    for step in range(4):
        set_scaled_grads(scaled, step, scaler.get_scale(), math.inf if step == 1 else None)
        scaler.unscale_(scaled)
        torch.nn.utils.clip_grad_norm_(params_of(scaled), 0.7)
        before = [p.grad.clone() for p in params_of(scaled)]
        scaler.step(scaled)
        scaler.update()
        assert_same([p.grad for p in params_of(scaled)], before)
        if step != 1:
            set_grads(params_of(plain), step)
            torch.nn.utils.clip_grad_norm_(params_of(plain), 0.7)
            plain.step()
    assert_same(scaled, plain)
    assert all(state["step"] == 3 for state in scaled.state.values())


@pytest.mark.parametrize("clip", [fusedadam.clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
@pytest.mark.parametrize("unscaled", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_scaled_training_is_torchs_fused_one(name, unscaled, clip):
    results = []
    for make, options in ((getattr(fusedadam, name), {}), (getattr(torch.optim, name), {"fused": True})):
        optimizer, scaler = make(leaves(dtypes=[F32]), lr=1e-2, weight_decay=0.1, **options), scaler_of(64.0)
        for step in range(5):
            set_scaled_grads(optimizer, step, scaler.get_scale(), math.inf if step == 2 else None)
            if unscaled:
                scaler.unscale_(optimizer)
                clip(params_of(optimizer), 0.7)
            scaler.step(optimizer)
            scaler.update()
        results.append(optimizer)
    ours, theirs = results
    assert all(ours.state[p]["step"] == 4 for p in params_of(ours))
    assert_same(ours, theirs, rtol=1e-5, atol=1e-6)


@EVERY_PLAIN
def test_a_scaler_that_is_not_enabled_and_optimizers_that_share_one(make):
    off = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = make(leaves())
    set_grads(params_of(optimizer), 0)
    off.step(optimizer)
    assert_same(optimizer, train(make(leaves()), 1))

    pair, scaler = [make(leaves(seed=k)) for k in range(2)], scaler_of()
    for step, bad in enumerate((None, math.inf, None)):
        for k, one in enumerate(pair):
            set_scaled_grads(one, step, scaler.get_scale(), bad if k == 1 else None)
            scaler.step(one)
        scaler.update()
    assert [int(one.state[params_of(one)[0]]["step"]) for one in pair] == [3, 2]


@EVERY
def test_a_model_trains_under_bfloat16_autocast(make):
    """Gradients of a forward pass in bfloat16 arrive in the parameters' float32."""
    model = Small()
    optimizer = make(model.parameters())
    optimizer.param_groups[0]["lr"] = {"Adadelta": 100.0, "RMSprop": 3e-3}.get(type(optimizer).__name__, 3e-2)
    if optimizer.param_groups[0].get("maximize"):
        optimizer.param_groups[0]["maximize"] = False
    losses = []
    for _ in range(15):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(0))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.dtype == F32 for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.7 * losses[0]


def test_an_optimizer_that_raises_in_a_scaled_step_goes_on_unscaled():
    """GradScaler leaves its scale on the optimizer then, as it does on torch's: deleting it is up to the caller."""
    optimizer, scaler = train(fusedadam.AdamW(leaves()), 1), scaler_of()
    set_scaled_grads(optimizer, 1, scaler.get_scale())
    before, lr = everything(optimizer), optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"] = lr
    assert_unchanged(optimizer, before)
    optimizer.__dict__.pop("grad_scale", None)
    optimizer.__dict__.pop("found_inf", None)
    assert_same(train(optimizer, 1, start=1), train(fusedadam.AdamW(leaves()), 2))
