"""peak_lr: weight decay follows the schedule of the learning rate, and does not depend on its size."""

from __future__ import annotations

import copy
import functools
import inspect
import math

import pytest
import torch

import fusedadam
from fusedadam.ascend.mindspeed import FusedEmaAdamW
from fusedadam.catalog import CATALOG
from fusedadam.contract import declarations
from tests.support import F64, QUICK_PLACES

# optimizers with the option, decoupled where that is a choice; Adan's own decay has a test of its own
CHOSEN = {"decoupled_weight_decay": True, "no_prox": True}
DECOUPLED = {
    name: functools.partial(entry.cls, **{option: on for option, on in CHOSEN.items() if option in entry.choices})
    for name, entry in CATALOG.items()
    if "peak_lr" in inspect.signature(entry.cls).parameters
}
WITHOUT = [name for name in CATALOG if name not in DECOUPLED]
assert {"AdamW", "EmaAdamW", "Lion"} < {*DECOUPLED}
assert {"Adam", "SGD", "BertAdam"} < {*WITHOUT}
PEAK, DECAY = 3e-2, 0.125
MULTIPLIERS = (0.125, 0.5, 1.0, 1.0, 0.75, 0.3, 0.0)  # of a schedule with warmup


def param_of(shape=(40,), device="cpu"):
    return torch.nn.Parameter(torch.linspace(-1, 1, math.prod(shape), dtype=F64).reshape(shape).to(device))


def grad_of(param, step):
    return torch.sin(torch.arange(param.numel(), dtype=F64) * (step + 1)).reshape(param.shape).to(param)


def train(optimizer, lrs, decays=None, start=0):
    """With a learning rate, and a weight decay if they are given, for each step."""
    (group,) = optimizer.param_groups
    for step, lr in enumerate(lrs, start):
        group["lr"] = lr
        if decays is not None:
            group["weight_decay"] = decays[step - start]
        group["params"][0].grad = grad_of(group["params"][0], step)
        optimizer.step()
    return group["params"][0].detach()


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("peak", [PEAK, 1000 * PEAK])
@pytest.mark.parametrize("name", DECOUPLED)
def test_without_gradients_weights_lose_the_same_at_any_learning_rate(name, peak, place):
    device, backend = place
    param = param_of(device=device)
    expected = param.detach().cpu().clone()
    optimizer = DECOUPLED[name]([param], lr=peak, weight_decay=DECAY, peak_lr=peak, backend=backend)
    for multiplier in MULTIPLIERS:
        optimizer.param_groups[0]["lr"] = peak * multiplier
        param.grad = torch.zeros_like(param)
        optimizer.step()
        expected = expected - DECAY * multiplier * expected
    torch.testing.assert_close(param.detach().cpu(), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("shape", [(40,), (5, 8)])
@pytest.mark.parametrize("name", [*DECOUPLED, "Adan with its own decay"])
def test_only_the_product_of_lr_and_weight_decay_is_another(name, shape):
    make, multipliers = DECOUPLED.get(name, fusedadam.Adan), MULTIPLIERS[:-1]
    lrs = [PEAK * multiplier for multiplier in multipliers]
    decays = [multiplier * DECAY / lr for multiplier, lr in zip(multipliers, lrs, strict=True)]
    ours = train(make([param_of(shape)], weight_decay=DECAY, peak_lr=PEAK), lrs)
    expected = train(make([param_of(shape)]), lrs, decays)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert not torch.equal(ours, train(make([param_of(shape)], weight_decay=DECAY), lrs))


def test_a_learning_rate_on_the_device_or_in_a_tensor():
    """With step counts that are tensors, as in a CUDA graph."""
    lr = torch.tensor(PEAK, dtype=F64)
    made = [{"lr": PEAK}, {"lr": lr, "capturable": True}]
    first, second = (
        train(fusedadam.AdamW([param_of()], weight_decay=DECAY, peak_lr=PEAK, **given), [given["lr"]] * 4)
        for given in made
    )
    torch.testing.assert_close(first, second, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", DECOUPLED)
def test_no_other_kernel_is_compiled(name):
    """The flags of the rule, which decide what is compiled, do not know of it."""
    make = DECOUPLED[name]
    flags = [make([param_of()], peak_lr=peak)._options().flags for peak in (None, PEAK)]
    assert flags[0] == flags[1]


@pytest.mark.parametrize("name", DECOUPLED)
def test_state_dicts_keep_it_and_older_ones_load(name):
    make, lrs = DECOUPLED[name], [PEAK * multiplier for multiplier in MULTIPLIERS]
    ours = make([param_of()], weight_decay=DECAY, peak_lr=PEAK)
    train(ours, lrs[:3])
    saved = copy.deepcopy(ours.state_dict())
    assert saved["param_groups"][0]["peak_lr"] == PEAK
    old = copy.deepcopy(saved)
    del old["param_groups"][0]["peak_lr"]
    others = make([param_of()]), make([param_of()], peak_lr=PEAK), make([param_of()])
    for other, state_dict in zip(others, (saved, old, old), strict=True):
        with torch.no_grad():
            other.param_groups[0]["params"][0].copy_(ours.param_groups[0]["params"][0])
        other.load_state_dict(state_dict)
    assert [other.param_groups[0]["peak_lr"] for other in others] == [PEAK, PEAK, None]
    expected = train(ours, lrs[3:], start=3)
    for other in others[:2]:
        assert torch.equal(train(other, lrs[3:], start=3), expected)


def test_groups_may_have_their_own_and_change_it():
    first, second = param_of(), param_of()
    optimizer = fusedadam.AdamW([{"params": [first]}, {"params": [second], "peak_lr": 1.0}], weight_decay=0.5, lr=1.0)
    for expected in (0.5, 0.75):
        for param in (first, second):
            param.grad = torch.zeros_like(param)
            param.data.fill_(1.0)
        optimizer.step()
        assert second.unique().item() == expected
        optimizer.param_groups[1]["peak_lr"] = 2.0


def test_an_l2_penalty_has_no_decay_of_its_own():
    says = "is for decoupled weight decay, and this group's is an L2 penalty"
    with pytest.raises(ValueError, match=says):
        fusedadam.EmaAdamW([param_of()], decoupled=False, peak_lr=PEAK)
    undecided = [e.cls for e in CATALOG.values() if "decoupled_weight_decay" in e.choices and e.name in DECOUPLED]
    assert fusedadam.RAdam in undecided
    for cls in undecided:
        with pytest.raises(ValueError, match=says):
            cls([param_of()], peak_lr=PEAK)
    with pytest.raises(ValueError, match=says):
        FusedEmaAdamW([{"params": [param_of()], "peak_lr": PEAK}], adam_w_mode=False)
    optimizer = fusedadam.EmaAdamW([param_of()], peak_lr=PEAK)
    optimizer.param_groups[0]["decoupled"] = False
    with pytest.raises(ValueError, match=says):
        train(optimizer, [PEAK])


@pytest.mark.parametrize("name", WITHOUT)
def test_others_have_no_such_option(name):
    """In their groups it is somebody else's key."""
    with pytest.raises(TypeError, match="peak_lr"):
        getattr(fusedadam, name)([param_of((8, 5))], peak_lr=PEAK)
    plain, ours = (getattr(fusedadam, name)([param_of((8, 5))], weight_decay=DECAY) for _ in range(2))
    ours.param_groups[0]["peak_lr"] = 2.0
    assert torch.equal(train(plain, [PEAK] * 3), train(ours, [PEAK] * 3))


def test_a_weight_decay_that_the_host_does_not_know():
    group = {"weight_decay": torch.empty((), device="meta"), "peak_lr": PEAK}
    with pytest.raises(ValueError, match="divides weight_decay on the host, and that is a tensor on meta"):
        declarations.RELATIVE_TO_LR["weight_decay"](group)


def test_a_schedule_keeps_to_the_short_way():
    """The option is no reason to read all options again whenever the learning rate changes."""
    optimizer = fusedadam.AdamW([param_of()], peak_lr=PEAK)
    optimizer._options()
    (reading,) = optimizer._stepper._group_options._readings
    assert reading.lr_at is not None


def test_the_scheduler_that_writes_a_peak_of_its_own():
    """OneCycleLR has max_lr in the groups: the reason for another name."""
    optimizer = fusedadam.AdamW([param_of()])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK, total_steps=4)
    assert optimizer.param_groups[0]["max_lr"] == PEAK
    assert optimizer.param_groups[0]["peak_lr"] is None


def test_a_peak_that_makes_the_decay_infinite_is_refused():
    """With a learning rate of 0, as at the start of a warmup, weights would become NaN."""
    param = param_of()
    before = param.detach().clone()
    with pytest.raises(ValueError, match=r"peak_lr=1e-320 is too small: weight_decay=0.1 divided by it is infinite"):
        fusedadam.AdamW([param], lr=0.0, weight_decay=0.1, peak_lr=1e-320).step()
    assert torch.equal(param, before)
