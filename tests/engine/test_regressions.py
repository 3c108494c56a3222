"""Bugs that were here once, each with the reason why nothing saw it before."""

from __future__ import annotations

import pytest
import torch

import fusedadam


def trained(optimizer_class=fusedadam.AdamW, count=2, **options):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
    optimizer = optimizer_class(params, **options)
    for p in params:
        p.grad = torch.ones(4)
    optimizer.step()
    return params, optimizer


def test_step_counts_follow_a_storage_that_moves():
    """share_memory_() moves the storage of all counts at once: every one was still a view, of freed memory."""
    _, optimizer = trained()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].share_memory_()
    for _ in range(3):
        optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [5, 5]


def test_a_parameter_moved_to_another_group_takes_that_groups_options():
    """The order of all parameters did not change, and with it nothing that was looked at."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = fusedadam.AdamW(
        [{"params": params[:1], "lr": 0.0}, {"params": params[1:], "lr": 1.0}], weight_decay=0.0
    )
    for p in params:
        p.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    before = params[1].item()
    optimizer.step()
    assert params[1].item() == before


def test_a_backend_changed_in_a_group_is_noticed():
    _, optimizer = trained()
    optimizer.param_groups[0]["backend"] = "nonsense"
    with pytest.raises(ValueError, match="nonsense"):
        optimizer.step()


def test_parameters_as_a_tuple():
    params, optimizer = trained()
    optimizer.param_groups[0]["params"] = tuple(params)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


def test_parameters_that_share_memory_are_refused():
    """Two threads would write to it at once, and the result would depend on them."""
    base = torch.ones(10)
    params = [base[:6].requires_grad_(), base[4:].requires_grad_()]
    for p in params:
        p.grad = torch.ones(6)
    with pytest.raises(RuntimeError, match="share memory"):
        fusedadam.AdamW(params).step()
    assert base.eq(1).all()


def test_a_tensor_without_memory_of_its_own_is_refused():
    """Sharded and other wrapped tensors have address 0."""
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(RuntimeError, match="TwoTensor without memory"):
        fusedadam.AdamW([torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))])


def test_a_state_with_moments_but_no_step_is_refused():
    params, optimizer = trained()
    del optimizer.state[params[0]]["step"]
    with pytest.raises(RuntimeError, match="no 'step'"):
        optimizer.step()


def test_options_that_a_checkpoint_does_not_have_stay():
    params = [torch.nn.Parameter(torch.ones(3))]
    theirs = torch.optim.AdamW(params)
    ours = fusedadam.EmaAdamW([{"params": params, "ema_decay": 0.5}], state_dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["ema_decay"] == 0.5
    assert ours.param_groups[0]["state_dtype"] == torch.float64


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_ema_adamw_refuses_what_it_does_not_do(option):
    with pytest.raises(ValueError, match=option):
        fusedadam.EmaAdamW([{"params": [torch.nn.Parameter(torch.ones(1))], option: True}])


def test_the_ema_reaches_the_state_dict_though_a_hook_replaces_its_tensors():
    model = torch.nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda m, state, prefix, meta: state.update({k: v.detach() for k, v in state.items()})
    )
    optimizer = fusedadam.EmaAdamW(model.parameters(), lr=0.5, ema_warmup=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(optimizer.ema_state_dict(model)["weight"], optimizer.state[model.weight]["ema_params"])
