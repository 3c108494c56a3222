"""What PyTorch's own suite asks of every optimizer, asked of ours: hooks, state dicts and copies.

Each test runs with every input that PyTorch lists for the optimizer; test_torch_inputs.py has their results and errors,
and test_torch_steps.py the rest.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fusedadam
from tests.contract.common import (
    assert_same,
    assert_unchanged,
    copies_of,
    everything,
    leaves_of,
    params_of,
    set_grads,
    tensors,
    train,
)
from tests.contract.test_torch_inputs import CLASSES, INFO, assert_as_torch, tolerance
from tests.support import F32, F64

EACH = [(name, one) for name in INFO for one in INFO[name].optim_inputs_func("cpu")]
EVERY_INPUT = pytest.mark.parametrize(("name", "one"), EACH, ids=[f"{name}, {one.desc}" for name, one in EACH])


def make(name, one=None, params=None, module=fusedadam, **more):
    options = copy.deepcopy(one.kwargs) if one is not None else {}
    return getattr(module, name)(leaves_of(name) if params is None else params, **{**options, **more})


def assert_close(name, ours, theirs, dtype=F32):
    rtol, atol = tolerance(name, dtype)
    assert_as_torch(ours, theirs, rtol=rtol, atol=atol)


# hooks


def counting(calls, what):
    return lambda *_: calls.append(what)


@CLASSES
def test_step_hooks_run_in_their_order_and_end_when_they_are_removed(name):
    optimizer, calls = make(name), []
    set_grads(params_of(optimizer), 0)
    handles = [
        optimizer.register_step_pre_hook(counting(calls, "before")),
        optimizer.register_step_post_hook(counting(calls, "after")),
        register_optimizer_step_pre_hook(counting(calls, "before any")),
        register_optimizer_step_post_hook(counting(calls, "after any")),
    ]
    optimizer.step()
    assert calls == ["before any", "before", "after", "after any"]
    for expected in (["before any", "after any"], []):  # without its own, then without any
        handles.pop(0).remove()
        handles.pop(0).remove()
        calls.clear()
        optimizer.step()
        assert calls == expected


@CLASSES
def test_a_hook_may_count_what_the_step_changes(name):
    """A hook before the step sees the old weights, and one after it the new ones."""
    optimizer, seen = make(name), []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda one, *_: seen.append([p.detach().clone() for p in params_of(one)]))
    before = [p.detach().clone() for p in params_of(optimizer)]
    train(optimizer, 1)
    assert_same(seen[0], before)
    assert_same(seen[1], [p.detach() for p in params_of(optimizer)])
    assert not torch.equal(seen[0][0], seen[1][0])


@CLASSES
def test_state_dict_hooks_run_and_a_later_one_may_replace_what_is_returned(name):
    optimizer = train(make(name, lr=0.1), 1)
    optimizer.register_state_dict_pre_hook(lambda one: one.param_groups[0].update(lr=0.25))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 1})
    first = optimizer.register_state_dict_post_hook(lambda _, saved: saved.update(seen="extra" in saved), prepend=True)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr"] == 0.25
    assert (saved["extra"], saved["seen"]) == (1, False)
    first.remove()
    assert "seen" not in optimizer.state_dict()


@CLASSES
def test_loading_hooks_run_in_their_order_around_the_load(name):
    source, optimizer, calls = train(make(name, lr=0.1), 2), make(name, lr=0.5), []
    before = everything(optimizer)

    def before_load(one, state_dict):
        calls.append("pre")
        assert_unchanged(one, before)
        state_dict["param_groups"][0]["lr"] = 0.125

    def after_load(one):
        calls.append("post")
        assert one.param_groups[0]["lr"] == 0.125
        one.state["ran"] = True  # as torch's own test does

    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(after_load)
    optimizer.load_state_dict(source.state_dict())
    assert calls == ["first", "pre", "post"]
    assert optimizer.state.pop("ran") is True
    assert_same(tensors(optimizer)[1], tensors(source)[1])
    optimizer.state["ran"] = True
    assert name in repr(optimizer)
    assert optimizer.memory_summary()
    train(optimizer, 1)


# state dicts


@EVERY_INPUT
def test_a_state_dict_goes_to_torch_and_back(name, one):
    """In the middle of a training, each way, with its options."""
    ours, theirs = (make(name, one, leaves_of(name, dtypes=[F64]), module) for module in (fusedadam, torch.optim))
    for optimizer in (ours, theirs):
        train(optimizer, 3)
    saved = copy.deepcopy((theirs.state_dict(), ours.state_dict()))  # torch's goes on with the tensors that it loads
    before = copy.deepcopy(saved)
    there, back = make(name, None, copies_of(theirs)), make(name, None, copies_of(ours), torch.optim)
    there.load_state_dict(saved[0])
    back.load_state_dict(saved[1])
    for optimizer in (ours, theirs, there, back):
        train(optimizer, 3, start=3)
    assert_close(name, there, theirs, F64)
    assert_close(name, ours, back, F64)
    torch.testing.assert_close(saved[0], before[0], rtol=0, atol=0)


@CLASSES
def test_state_dicts_of_older_versions_are_loaded(name):
    """Without the options that came later, which keep their values, and with a step that is a plain number."""
    for one in INFO[name].optim_inputs_func("cpu"):
        straight, optimizer = train(make(name, one), 4), train(make(name, one), 2)
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            for flag in INFO[name].not_og_supported_flags:
                group.pop(flag, None)
        for state in saved["state"].values():
            state["step"] = state["step"].item()
        optimizer.load_state_dict(saved)
        assert_same(straight, train(optimizer, 2, start=2))


@CLASSES
def test_a_state_dict_that_does_not_fit_is_refused_as_torch_refuses_it(name):
    optimizer = train(make(name), 1)
    before, saved = everything(optimizer), optimizer.state_dict()
    one_more = {**saved, "param_groups": [*saved["param_groups"], *saved["param_groups"]]}
    fewer = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1]}]}
    for wrong, match in ((one_more, "different number of parameter groups"), (fewer, "doesn't match the size")):
        with pytest.raises(ValueError, match=match):
            make(name, module=torch.optim).load_state_dict(wrong)
        with pytest.raises(ValueError, match=match):
            optimizer.load_state_dict(wrong)
    assert_unchanged(optimizer, before)


@CLASSES
def test_groups_are_loaded_by_their_position(name):
    """Groups that are listed in another order take each other's options: so do torch's."""
    rates, loaded = (0.125, 0.5), []
    for module in (fusedadam, torch.optim):
        sources, targets = leaves_of(name), leaves_of(name)
        pairs = [{"params": sources[:2], "lr": rates[0]}, {"params": sources[2:], "lr": rates[1]}]
        swapped = [{"params": targets[2:], "lr": rates[1]}, {"params": targets[:2], "lr": rates[0]}]
        source, target = make(name, None, pairs, module), make(name, None, swapped, module)
        target.load_state_dict(source.state_dict())
        loaded.append([group["lr"] for group in target.param_groups])
    assert loaded == [list(rates)] * 2


def named(params, prefix="p"):
    return [(f"{prefix}{k}", p) for k, p in enumerate(params)]


@CLASSES
@pytest.mark.parametrize(("saves_names", "loads_names"), [(True, True), (True, False), (False, True)])
def test_names_of_parameters_are_loaded_as_in_torch(name, saves_names, loads_names):
    """The loading optimizer's own names stay, and without any it takes those of the state dict."""
    kept = []
    for module in (fusedadam, torch.optim):
        source = train(make(name, None, named(leaves_of(name)) if saves_names else leaves_of(name), module), 1)
        target = make(name, None, named(leaves_of(name), "q") if loads_names else leaves_of(name), module)
        saved = source.state_dict()
        target.load_state_dict(saved)
        train(target, 1)
        kept.append([one["param_groups"][0].get("param_names") for one in (saved, target.state_dict())])
    assert kept[0] == kept[1]


@CLASSES
def test_a_hook_may_reorder_a_state_dict_by_name(name):
    """torch's documented recipe for models whose parameters come in another order."""

    def by_name(one, state_dict):
        names = state_dict["param_groups"][0]["param_names"]
        order = [names.index(wanted) for wanted in one.param_groups[0]["param_names"]]
        state = {k: state_dict["state"][old] for k, old in enumerate(order)}
        return {**state_dict, "state": state}

    source = train(make(name, None, named(leaves_of(name))), 2)
    target = make(name, None, named(leaves_of(name))[::-1])
    target.register_load_state_dict_pre_hook(by_name)
    target.load_state_dict(source.state_dict())
    assert_same(tensors(target)[1], tensors(source)[1][::-1])


# copies


def public(optimizer):
    return {key for key in vars(optimizer) if not key.startswith("_")}


@EVERY_INPUT
def test_copies_have_everything_and_go_on_alike(name, one):
    optimizer = train(make(name, one), 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for twin in copies:
        assert public(twin) == public(optimizer)
        assert repr(twin) == repr(optimizer)
        assert_same(twin, optimizer)
    train(optimizer, 2, start=2)
    for twin in copies:
        assert_same(train(twin, 2, start=2), optimizer)
