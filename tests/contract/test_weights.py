"""Weights as float32."""

from __future__ import annotations

import pytest
import torch

from fusedadam import AdamW, EmaAdamW


def model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 64)).to(dtype)


@pytest.mark.parametrize("storage", ["exact", "16bit", "8bit"])
def test_float32_weights_are_set_and_given_back_without_loss_but_for_what_24_bits_do_not_hold(storage):
    exact, trained = model(torch.float32), model()
    optimizer = AdamW(trained.parameters(), storage=storage)
    optimizer.load_float32_state_dict(trained, exact.state_dict())
    assert {k: v.dtype for k, v in trained.state_dict().items()} == {
        k: v.dtype for k, v in model().state_dict().items()
    }
    back = optimizer.float32_state_dict(trained)
    for name, value in exact.state_dict().items():
        if storage == "8bit" and value.dim() == 2:
            assert torch.allclose(back[name], value, rtol=2.0**-16, atol=0)
        elif "running" not in name:
            assert torch.equal(back[name], value)
    for param in trained.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    moved = optimizer.float32_state_dict(trained)["0.weight"] - back["0.weight"]
    assert moved.abs().max() < 2e-3


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="none of this optimizer's parameters"):
        AdamW(model().parameters(), storage="exact").float32_state_dict(model())


@pytest.mark.parametrize("storage", ["exact", "16bit", "8bit"])
def test_a_widened_state_dict_is_torchs(storage):
    trained = model()
    optimizer = AdamW(trained.parameters(), storage=storage)
    for param in trained.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    wide = AdamW.widen_state_dict(optimizer.state_dict())
    theirs = torch.optim.AdamW(model(torch.float32).parameters())
    theirs.load_state_dict(wide)
    for state in theirs.state.values():
        assert {*state} == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].dtype == torch.float32
    again = AdamW(trained.parameters(), storage=storage)
    again.load_state_dict(wide)
    for param in trained.parameters():
        for name, value in again.state[param].items():
            assert torch.equal(value, optimizer.state[param][name])


@pytest.mark.parametrize("storage", ["exact", "8bit"])
def test_a_state_dict_between_loading_float32_weights_and_the_first_step(storage):
    """It had the low bits alone, and no optimizer could load it, nor a checkpoint fill it."""
    ends = []
    for detour in (False, True):
        trained = model()
        optimizer = EmaAdamW(trained.parameters(), storage=storage, lr=1e-2)
        optimizer.load_float32_state_dict(trained, model(torch.float32).state_dict())
        if detour:
            saved = optimizer.state_dict()
            assert all({"step", "param_low"} < {*state} for state in saved["state"].values())
            optimizer = EmaAdamW(trained.parameters(), storage=storage, lr=1e-2)
            optimizer.load_state_dict(saved)
        for k, param in enumerate(trained.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(k)).to(param)
        optimizer.step()
        ends.append([[p.detach(), *optimizer.state[p].values()] for p in trained.parameters()])
    torch.testing.assert_close(*ends, rtol=0, atol=0)
