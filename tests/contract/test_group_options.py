"""Options changed in param_groups are checked by the next step, before anything is written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fusedadam
from tests.contract.common import (
    CLIPPED,
    PLAIN,
    assert_same,
    assert_unchanged,
    everything,
    leaves,
    params_of,
    set_grads,
    train,
)

BAD = {
    "lr": ["0.1", -1.0, math.nan, math.inf, None, True, torch.tensor(-1.0), torch.ones(2)],
    "weight_decay": ["0.1", -0.1, math.nan],
    "betas": [(0.9, 1.0), (0.9,), 0.9, ("0.9", 0.999), [0.9, -0.1]],
    "b1": [1.0, "0.9"],
    "eps": [-1e-8, "1e-8"],
    "e": [-1e-8],
    "peak_lr": [0, -1.0, math.inf, math.nan, True, "1e-3", torch.ones(2)],
    "max_grad_norm": ["1", math.nan, -2.0],
    "amsgrad": ["yes", 1],
    "maximize": [1, "no"],
    "nesterov": ["yes", 1],
    "delta": [-1.0],
    "wd_ratio": ["a", math.nan],
    "ema_decay": [1.5, -0.1],
    "schedule": ["nonsense", None],
    "clip": ["layer"],
    "t_total": [0.5, 0],
    "warmup": [1.0],
    "backend": ["nonsense"],
    "state_dtype": [torch.int8, "float31"],
    "ema_dtype": [torch.int8],
    "capturable": ["yes"],
    "differentiable": [True],
    "foreach": ["yes"],
}


def cases():
    for title, make in {**PLAIN, "AdamW clipped": CLIPPED["AdamW clipped"]}.items():
        options = make(leaves()).defaults
        for name, values in BAD.items():
            if name in options:
                yield from (pytest.param(make, name, value, id=f"{title}-{name}-{value!r}") for value in values)


@pytest.mark.parametrize("before_first_step", [True, False], ids=["first step", "later"])
@pytest.mark.parametrize(("make", "name", "value"), list(cases()))
def test_a_bad_option_is_named_and_nothing_is_written(make, name, value, before_first_step):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=name):
        make(leaves(), **{name: value})
    optimizer = make(leaves())
    if not before_first_step:
        train(optimizer, 2)
    set_grads(params_of(optimizer), 7)
    good, optimizer.param_groups[0][name] = optimizer.param_groups[0][name], value
    before = everything(optimizer)
    for _ in range(2):  # and again, as long as it is there
        with pytest.raises((ValueError, TypeError, RuntimeError), match=name):
            optimizer.step()
    if value == value if isinstance(value, float) else not (isinstance(value, torch.Tensor) and value.dim()):
        assert_unchanged(optimizer, before)
    optimizer.param_groups[0][name] = good
    optimizer.step()
    other = train(make(leaves()), 0 if before_first_step else 2)
    set_grads(params_of(other), 7)
    other.step()
    assert_same(optimizer, other)


def test_what_changes_without_becoming_another_object_is_noticed():
    """A tensor, or a list of betas, that is written to."""
    lr, betas = torch.tensor(0.1), [0.9, 0.99]
    optimizer = train(fusedadam.AdamW(leaves(), lr=lr, betas=betas), 2)
    other = train(fusedadam.AdamW(leaves(), lr=0.1, betas=(0.9, 0.99)), 2)
    optimizer.param_groups[0]["lr"].fill_(0.2)
    optimizer.param_groups[0]["betas"][0] = 0.5
    other.param_groups[0].update(lr=float(torch.tensor(0.2)), betas=(0.5, 0.99))
    assert_same(train(optimizer, 2, start=2), train(other, 2, start=2), rtol=1e-6, atol=1e-7)
    optimizer.param_groups[0]["lr"].fill_(-1)
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.1)
    optimizer.param_groups[0]["betas"][1] = 1.5
    with pytest.raises(ValueError, match="betas"):
        optimizer.step()


def test_an_option_changed_in_the_second_of_two_groups():
    first, second = leaves()[:2]
    optimizer = fusedadam.AdamW([{"params": [first]}, {"params": [second], "lr": 0.1}])
    train(optimizer, 1)
    optimizer.param_groups[1]["max_grad_norm"] = -1
    with pytest.raises(ValueError, match="max_grad_norm=-1 is out of range"):
        optimizer.step()


def test_checks_run_when_something_changed_and_only_then(monkeypatch):
    asked = []
    check = classmethod(lambda cls, group, names=None: asked.append(dict(group)))
    monkeypatch.setattr(fusedadam.AdamW, "check", check)
    optimizer = train(fusedadam.AdamW(leaves()), 1)
    asked.clear()
    train(optimizer, 3)
    assert not asked
    optimizer.param_groups[0]["eps"] = 1e-6
    train(optimizer, 3)
    assert len(asked) == 1
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)  # another object, the same values
    train(optimizer, 1)
    assert len(asked) == 1


@pytest.mark.parametrize("make", [fusedadam.AdamW, fusedadam.Adam, fusedadam.EmaAdamW, fusedadam.AdamP])
def test_a_norm_of_zero_means_no_clipping_everywhere(make):
    """As in BertAdam and in Hugging Face's Trainer. It stopped the training."""
    plain, zero = train(make(leaves()), 3), train(make(leaves(), max_grad_norm=0), 3)
    assert_same(plain, zero)
    assert zero.grad_norm is None
    zero.param_groups[0]["max_grad_norm"] = 1e-3
    train(zero, 1)
    assert zero.grad_norm is not None


def test_messages_about_norms_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"max_grad_norm=-1 is out of range; it must be above 0 \(inf computes"):
        fusedadam.AdamW(leaves(), max_grad_norm=-1)
    with pytest.raises(ValueError, match="max_norm=-1 is out of range; it must be at least 0, and may be infinite"):
        fusedadam.clip_grad_norm_(leaves(), -1)
    assert fusedadam.clip_grad_norm_(leaves(), math.inf) == 0


@pytest.mark.parametrize("name", ["betas", "eps", "weight_decay"])
def test_other_options_may_be_tensors_too(name):
    value = {"betas": (0.8, torch.tensor(0.99, dtype=torch.float64)), "eps": torch.tensor(1e-4, dtype=torch.float64)}
    value["weight_decay"] = torch.tensor(0.25)
    plain = {"betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.25}
    ours = train(fusedadam.AdamW(leaves(), **{name: value[name]}), 3)
    assert_same(ours, train(fusedadam.AdamW(leaves(), **{name: plain[name]}), 3))


@pytest.mark.parametrize("total", range(2, 30))
def test_a_scheduler_that_misses_zero_by_a_rounding_error(total):
    """LinearLR(end_factor=0) ends at numbers such as -5e-20, with which torch goes on."""
    optimizer = fusedadam.AdamW(leaves(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.9, 0.0, total_iters=total)
    for step in range(total + 2):
        set_grads(params_of(optimizer), step)
        optimizer.step()
        scheduler.step()
    assert abs(optimizer.param_groups[0]["lr"]) < 1e-15
    fusedadam.AdamW(leaves()).load_state_dict(optimizer.state_dict())


def test_what_others_keep_in_groups_is_theirs():
    optimizer, other = (train(fusedadam.AdamW(leaves()), 1) for _ in range(2))
    for step in range(1, 4):
        optimizer.param_groups[0].update(mask=np.arange(3), anchors=[torch.ones(3)], initial_lr=torch.ones(2), name="x")
        train(optimizer, 1, start=step)
    assert_same(optimizer, train(other, 3, start=1))


def test_an_option_removed_while_something_else_is_added():
    """As many keys as before, and the option that is gone has its default meaning."""
    optimizer = fusedadam.AdamW(leaves(), max_grad_norm=1e-3)
    optimizer.param_groups[0]["foo"] = 1
    train(optimizer, 1)
    assert optimizer.grad_norm is not None
    del optimizer.param_groups[0]["foo"]
    train(optimizer, 1)
    del optimizer.param_groups[0]["max_grad_norm"]
    optimizer.param_groups[0]["foo"] = 1
    train(optimizer, 1)
    assert optimizer.grad_norm is None


WAYS = {
    "as it is": lambda group: group["lr"],
    "copied": lambda group: dict(group)["lr"],
    "unpacked": lambda group: {**group}["lr"],
    "joined": lambda group: (group | {})["lr"],
    "gone through": lambda group: next(value for name, value in group.items() if name == "lr"),
    "setdefault": lambda group: group.setdefault("lr", 0.0),
    "popped from a copy": lambda group: group.copy().pop("lr"),
}


@pytest.mark.parametrize("lr_of", WAYS.values(), ids=WAYS)
def test_a_derived_option_may_read_the_learning_rate_in_any_way(lr_of):
    class Derived(fusedadam.AdamW):
        derived = fusedadam.AdamW.derived | {"weight_decay": lambda group: group["weight_decay"] * lr_of(group)}

    param, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    derived = Derived([param], weight_decay=0.5, backend="eager")
    plain = fusedadam.AdamW([other], backend="eager")
    for lr in (0.1, 0.2, 0.3):
        derived.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = lr
        plain.param_groups[0]["weight_decay"] = 0.5 * lr
        param.grad, other.grad = torch.ones(3), torch.ones(3)
        derived.step()
        plain.step()
    assert torch.equal(param, other)


def test_a_class_that_checks_the_learning_rate_against_other_options_sees_every_change():
    class Bounded(fusedadam.AdamW):
        @classmethod
        def check(cls, group, names=None):
            super().check(group, names)
            if group["lr"] > group["peak_lr"]:
                raise ValueError("lr is above peak_lr")

    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = Bounded([param], lr=0.1, peak_lr=0.5, backend="eager")
    for lr in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.9
    before = everything(optimizer)
    with pytest.raises(ValueError, match="above peak_lr"):
        optimizer.step()
    assert_unchanged(optimizer, before)
