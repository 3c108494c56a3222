"""What PyTorch's own suite asks of the steps of every optimizer, asked of ours: states, groups, flags."""

from __future__ import annotations

import torch

import fusedadam
from tests.contract.common import (
    assert_same,
    assert_unchanged,
    everything,
    leaves_of,
    params_of,
    set_grads,
    tensors,
    train,
)
from tests.contract.test_torch_suite import EVERY_INPUT, assert_close, make
from tests.support import F64


@EVERY_INPUT
def test_a_state_that_is_not_empty_is_kept(name, one):
    """After a step each parameter has a state, of tensors, whose sizes a load into another optimizer finds again."""
    optimizer = train(make(name, one), 1)
    for p in params_of(optimizer):
        state = optimizer.state[p]
        assert state
        assert all(isinstance(value, torch.Tensor) for value in state.values())
    other = make(name, one)
    other.load_state_dict(optimizer.state_dict())
    assert_same(tensors(other)[1], tensors(optimizer)[1])


@EVERY_INPUT
def test_without_gradients_nothing_changes(name, one):
    optimizer = make(name, one)
    before = everything(optimizer)
    optimizer.step()
    assert_unchanged(optimizer, before)
    train(optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in params_of(optimizer))
    optimizer.zero_grad()
    before = everything(optimizer)
    optimizer.step()
    assert_unchanged(optimizer, before)


@EVERY_INPUT
def test_gradients_of_zero_do_what_they_do_in_torch(name, one):
    """Nothing, unless weights decay; as torch's test has it, a first step and a later one."""
    ours, theirs = make(name, one), make(name, one, module=torch.optim)
    for optimizer in (ours, theirs):
        before = [p.detach().clone() for p in params_of(optimizer)]
        for scale in (0.0, 0.0, 1.0, 0.0):
            set_grads(params_of(optimizer), 0, scale)
            optimizer.step()
            if not scale and not optimizer.defaults["weight_decay"] and before is not None:
                assert_same([p.detach() for p in params_of(optimizer)], before)
            before = before if not scale else None
    assert_close(name, ours, theirs)


@EVERY_INPUT
def test_foreach_and_fused_choose_nothing_however_they_are_set(name, one):
    """As defaults, in a group, or later: torch's own choice of an implementation, and here always the same bits."""
    plain = train(make(name, one), 3)
    for flag in {"foreach", "fused"} & plain.defaults.keys():
        for value in (None, False, True):
            assert_same(train(make(name, one, **{flag: value}), 3), plain)
            assert_same(train(make(name, one, [{"params": leaves_of(name), flag: value}]), 3), plain)
            changed = train(make(name, one), 1)
            changed.defaults[flag] = changed.param_groups[0][flag] = value
            assert_same(train(changed, 2, start=1), plain)


@EVERY_INPUT
def test_groups_have_rates_and_decays_of_their_own_as_in_torch(name, one):
    optimizers = []
    for module in (fusedadam, torch.optim):
        params = leaves_of(name, dtypes=[F64])
        groups = [
            {"params": params[:2], "lr": 0.05},
            {"params": params[2:3], "weight_decay": 0.2},
            {"params": params[3]},
        ]
        optimizers.append(train(make(name, one, groups, module), 5))
    assert_close(name, *optimizers, dtype=F64)
