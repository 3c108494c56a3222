"""What PyTorch's own suite asks of the steps of every optimizer, asked of ours: groups, rates, flags, schedulers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

import fusedadam
from tests.contract.common import (
    assert_same,
    assert_unchanged,
    everything,
    leaves,
    params_of,
    set_grads,
    tensors,
    train,
)
from tests.contract.test_torch_inputs import CLASSES, INFO
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
            assert_same(train(make(name, one, [{"params": leaves(), flag: value}]), 3), plain)
            changed = train(make(name, one), 1)
            changed.defaults[flag] = changed.param_groups[0][flag] = value
            assert_same(train(changed, 2, start=1), plain)


@EVERY_INPUT
def test_groups_have_rates_and_decays_of_their_own_as_in_torch(name, one):
    optimizers = []
    for module in (fusedadam, torch.optim):
        params = leaves(dtypes=[F64])
        groups = [
            {"params": params[:2], "lr": 0.05},
            {"params": params[2:3], "weight_decay": 0.2},
            {"params": params[3]},
        ]
        optimizers.append(train(make(name, one, groups, module), 5))
    assert_close(name, *optimizers, dtype=F64)


@CLASSES
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_as_learning_rate_is_the_number_in_it(name, shape):
    for one in INFO[name].optim_inputs_func("cpu"):
        rate = torch.full(shape, 0.0625)
        tensor, number = make(name, one, lr=rate), make(name, one, lr=0.0625)
        assert_same(train(tensor, 3), train(number, 3))
        assert tensor.param_groups[0]["lr"] is rate


@EVERY_INPUT
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_it_goes_downhill(name, one, layout):
    """Or uphill with maximize: a linear model of torch's own test, by a closure."""
    torch.manual_seed(0)
    weight, bias = torch.randn(10, 5, 2)[..., 0], torch.randn(10, 2)[..., 0]
    if layout == "contiguous":
        weight, bias = weight.contiguous(), bias.contiguous()
    weight, bias, x = torch.nn.Parameter(weight), torch.nn.Parameter(bias), torch.randn(5)
    optimizer = make(name, one, [weight, bias])

    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(x) + bias).square().sum()
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(20):
        optimizer.step(closure)
    last = closure().item()
    assert last > first if optimizer.defaults["maximize"] else last < first


@pytest.mark.parametrize("name", [name for name in INFO if getattr(fusedadam, name).takes_complex])
def test_complex_parameters_are_two_real_ones(name):
    for one in INFO[name].optim_inputs_func("cpu"):
        torch.manual_seed(0)
        whole = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        parts = torch.nn.Parameter(torch.view_as_real(whole.detach()).clone())
        optimizers = make(name, one, [whole]), make(name, one, [parts])
        for _ in range(3):
            whole.grad = torch.randn_like(whole)
            parts.grad = torch.view_as_real(whole.grad).clone()
            for optimizer in optimizers:
                optimizer.step()
        assert_same([torch.view_as_real(whole.detach())], [parts.detach()])


# schedulers


def sequence(optimizer):
    first, second = lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.8)
    return lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[4])


def chain(optimizer):
    both = lr_scheduler.ConstantLR(optimizer, total_iters=4), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.ChainedScheduler(both)


CYCLE = {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}
MOMENTUM = [name for name in INFO if {"betas", "momentum"} & {*getattr(fusedadam, name).options}]
SCHEDULERS = {
    "LambdaLR": functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "MultiplicativeLR": functools.partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "StepLR": functools.partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "MultiStepLR": functools.partial(lr_scheduler.MultiStepLR, milestones=[2, 5]),
    "ConstantLR": functools.partial(lr_scheduler.ConstantLR, total_iters=4),
    "LinearLR": functools.partial(lr_scheduler.LinearLR, total_iters=6),
    "ExponentialLR": functools.partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "PolynomialLR": functools.partial(lr_scheduler.PolynomialLR, total_iters=8, power=2.0),
    "CosineAnnealingLR": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    "CosineAnnealingWarmRestarts": functools.partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    "ReduceLROnPlateau": functools.partial(lr_scheduler.ReduceLROnPlateau, patience=1),
    "CyclicLR": functools.partial(lr_scheduler.CyclicLR, cycle_momentum=False, **CYCLE),
    "OneCycleLR": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10, cycle_momentum=False),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": functools.partial(swa_utils.SWALR, swa_lr=0.01, anneal_epochs=4),
}
CYCLED = {  # these change momentum, or the first beta, too
    "CyclicLR": functools.partial(lr_scheduler.CyclicLR, **CYCLE),
    "OneCycleLR": functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10),
}


def steered_alike(name, make_scheduler, **options):
    optimizers = [make(name, None, leaves(dtypes=[F64]), m, lr=0.1, **options) for m in (fusedadam, torch.optim)]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    rates = []
    for step in range(8):
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            train(optimizer, 1, start=step)
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
    assert all(ours == theirs for ours, theirs in rates)
    assert len({ours for ours, _ in rates}) > 1, "the scheduler changes nothing"
    assert_close(name, *optimizers, dtype=F64)


@CLASSES
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_steers_ours_as_it_steers_torchs(name, scheduler):
    steered_alike(name, SCHEDULERS[scheduler])


@pytest.mark.parametrize("name", MOMENTUM)
@pytest.mark.parametrize("scheduler", CYCLED)
def test_schedulers_that_cycle_momentum_do_so_alike(name, scheduler):
    options = {"momentum": 0.9} if "momentum" in getattr(fusedadam, name).options else {}
    steered_alike(name, CYCLED[scheduler], **options)


def test_no_scheduler_of_torchs_is_left_out():
    public = {
        name for name, value in vars(lr_scheduler).items() if isinstance(value, type) and name in lr_scheduler.__all__
    }
    assert public - {"LRScheduler"} <= SCHEDULERS.keys()
