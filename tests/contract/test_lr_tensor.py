"""A learning rate as a tensor, and every scheduler of torch: the same bits as numbers set by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from tests.contract.common import EVERY, EVERY_PLAIN, PLAIN, assert_same, copies_of, leaves, params_of, train
from tests.support import F32, F64, LR_OF_ONE_DIMENSION

FACTORS = [1.0, 0.5, 3.0, 0.0, 7.0]
KINDS = {
    "a number": lambda value: value,
    "0-d": lambda value: torch.tensor(value, dtype=F64),
    "1-d": lambda value: torch.tensor([value], dtype=F64),
    "0-d float32": lambda value: torch.tensor(value, dtype=F32),
}
TENSORS = {name: make for name, make in KINDS.items() if name != "a number"}


def with_options(make, seen):
    """Ours with the options of each step set by hand."""
    optimizer = make(leaves())
    for step, options in enumerate(seen):
        optimizer.param_groups[0].update(options)
        train(optimizer, 1, start=step)
    return optimizer


def by_hand(make, rates):
    return with_options(make, [{"lr": rate} for rate in rates])


@EVERY
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_changes_in_place_is_the_number_it_holds(make, kind):
    """Its value is asked for in every step, though the tensor and everything else stay the same."""
    lr, optimizer, rates = TENSORS[kind](0.02), make(leaves()), []
    optimizer.param_groups[0]["lr"] = lr
    for step, factor in enumerate(FACTORS):
        lr.fill_(0.02 * factor)
        rates.append(lr.item())
        train(optimizer, 1, start=step)
        assert lr.item() == rates[-1]
        assert optimizer.param_groups[0]["lr"] is lr
    assert_same(optimizer, by_hand(make, rates))


@EVERY
def test_it_may_be_a_tensor_now_and_a_number_then(make):
    optimizer, rates = make(leaves()), [0.02, 0.01, 0.03, 0.02, 0.02]
    for step, (rate, kind) in enumerate(zip(rates, ["0-d", "a number", "1-d", "a number", "0-d"], strict=True)):
        optimizer.param_groups[0]["lr"] = KINDS[kind](rate)
        train(optimizer, 1, start=step)
    assert_same(optimizer, by_hand(make, rates))


@EVERY
def test_groups_may_share_a_tensor_or_have_their_own(make):
    shared, own = torch.tensor(0.02, dtype=F64), torch.tensor([0.01], dtype=F64)
    params, others = leaves(), leaves()
    ours = make([{"params": [p], "lr": lr} for p, lr in zip(params, (shared, own, shared, 0.05), strict=True)])
    numbers = make([{"params": [p], "lr": float(g["lr"])} for p, g in zip(others, ours.param_groups, strict=True)])
    for step in range(4):
        for optimizer in (ours, numbers):
            train(optimizer, 1, start=step)
        for k, factor in ((0, 0.5), (1, 3.0)):
            ours.param_groups[k]["lr"].mul_(factor)
        for group, factor in zip(numbers.param_groups, (0.5, 3.0, 0.5, 1.0), strict=True):
            group["lr"] *= factor
    assert_same(ours, numbers)


@EVERY_PLAIN
def test_a_tensor_that_needs_a_gradient_gets_none(make):
    """It is taken as a number: the step is not differentiable, and keeps no graph."""
    lr = torch.tensor(0.02, dtype=F64, requires_grad=True)
    optimizer = make(leaves())
    optimizer.param_groups[0]["lr"] = lr
    train(optimizer, 2)
    assert not any(p.grad_fn or any(s.requires_grad for s in optimizer.state[p].values()) for p in params_of(optimizer))
    assert_same(optimizer, by_hand(make, [0.02, 0.02]))


@EVERY_PLAIN
def test_copies_have_a_tensor_of_their_own(make):
    optimizer = make(leaves())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    twin = copy.deepcopy(train(optimizer, 1))
    optimizer.param_groups[0]["lr"].fill_(5.0)
    train(twin, 1, start=1)
    assert_same(twin, by_hand(make, [torch.tensor(0.02).item()] * 2))


# schedulers

STEPS = 9
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9 if n % 2 else 1.1),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 6], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=0.7),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2", cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS + 1, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.003, anneal_epochs=4),
}
MOMENTUM = {  # these move beta1 up and down, too, where there is one
    "CyclicLR with momentum": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, base_momentum=0.7, max_momentum=0.9),
    "OneCycleLR with momentum": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
}
NOT_SCHEDULERS = {"LRScheduler": "the base class"}


def test_no_scheduler_is_forgotten():
    public = {*lr_scheduler.__all__, "SWALR"}
    assert public - NOT_SCHEDULERS.keys() == SCHEDULERS.keys()


def advance(scheduler):
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(*([1.0] if plateau else []))


def option(group, name):
    value = group[name]
    return copy.copy(value.item() if isinstance(value, torch.Tensor) else value)


def scheduled(optimizer, build, names=("lr",)):
    """What the options were in each step of a training with this scheduler."""
    seen, scheduler = [], build(optimizer)
    for step in range(STEPS):
        seen.append({name: option(optimizer.param_groups[0], name) for name in names})
        train(optimizer, 1, start=step)
        advance(scheduler)
    return seen


# each optimizer with a number, one of them with every kind of tensor
WITH_KINDS = [pytest.param(make, "a number", id=f"{name}-a number") for name, make in PLAIN.items()]
WITH_KINDS += [
    pytest.param(PLAIN["AdamW"], kind, id=f"AdamW-{kind}")
    for kind in TENSORS
    if LR_OF_ONE_DIMENSION or kind != "1-d"  # schedulers of torch 2.6 do not accept it, and optimizers neither
]


@pytest.mark.parametrize(("make", "kind"), WITH_KINDS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_equals_its_numbers_set_by_hand(make, name, kind):
    """The numbers are those that it gives torch's own AdamW, from a learning rate of the same kind."""
    theirs, ours = torch.optim.AdamW(leaves()), make(leaves())
    for optimizer in (theirs, ours):
        optimizer.param_groups[0]["lr"] = KINDS[kind](0.02)
    seen = scheduled(theirs, SCHEDULERS[name])
    assert len({options["lr"] for options in seen}) > 1, "the scheduler changes nothing"
    assert scheduled(ours, SCHEDULERS[name]) == seen
    assert_same(ours, with_options(make, seen))


@EVERY_PLAIN
@pytest.mark.parametrize("name", MOMENTUM)
def test_a_scheduler_that_moves_the_betas_equals_its_numbers_set_by_hand(make, name):
    ours = make(leaves())
    moved = next((option for option in ("betas", "momentum") if option in ours.defaults), None)
    if moved is None:  # BertAdam's is called b1, and Adadelta has none: torch says that it finds none
        with pytest.raises(ValueError, match="momentum"):
            MOMENTUM[name](ours)
        return
    theirs = (torch.optim.AdamW if moved == "betas" else torch.optim.SGD)(leaves(), lr=0.02)
    rest = []
    if moved == "betas":  # the first is moved; ours may have others, and a third
        first, second, *rest = ours.param_groups[0]["betas"]
        theirs.param_groups[0]["betas"] = (first, second)
    seen = scheduled(theirs, MOMENTUM[name], ("lr", moved))
    if rest:
        seen = [{**own, "betas": (*own["betas"], *rest)} for own in seen]
    assert len({options[moved] for options in seen}) > 1
    assert scheduled(ours, MOMENTUM[name], ("lr", moved)) == seen
    assert_same(ours, with_options(make, seen))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_after_a_resume(name):
    """Optimizer and scheduler are saved and loaded in the middle."""
    make = PLAIN["EmaAdamW"]
    straight = make(leaves())
    scheduled(straight, SCHEDULERS[name])
    first = make(leaves())
    scheduler = SCHEDULERS[name](first)
    for step in range(4):
        train(first, 1, start=step)
        advance(scheduler)
    second = make(copies_of(first))
    again = SCHEDULERS[name](second)
    again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(4, STEPS):
        train(second, 1, start=step)
        advance(again)
    assert_same(second, straight)
