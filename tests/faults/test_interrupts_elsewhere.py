"""Ctrl-C and a lack of memory outside steps: clipping, operators, backward, loading, averages.

The promise. Clipping and the operators leave every tensor with its old or its new value, and the next call works.
Stepping in backward leaves every parameter and its states old or new; after zero_grad() and step() the next iteration
works. Loading a state dict and adding a group happen completely or not at all.
"""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch

import fusedadam
from fusedadam.functional import adamw_
from tests.contract.common import (
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
from tests.faults.consistency import assert_old_or_new, assert_same_values, reloaded, values
from tests.faults.interrupting import check_everywhere, interrupted, points
from tests.support import BF16, F32, F64


def in_another_thread(function):
    """Where launches that this thread has kept are not used."""
    results = []
    worker = threading.Thread(target=lambda: results.append(function()))
    worker.start()
    worker.join()
    return results[0]


FEW = pytest.mark.parametrize("most", [25, pytest.param(None, marks=pytest.mark.exhaustive)])


@FEW
@pytest.mark.parametrize("is_first", [True, False])
def test_clipping(is_first, most):
    def made():
        params = leaves(dtypes=(F32, F64))
        if is_first:
            fusedadam.clipping.LAUNCHES._kept.clear()
        set_grads(params, 1)
        return params

    def clip(params):
        return fusedadam.clip_grad_norm_(params, 0.5)

    fusedadam.clip_grad_norm_(made(), 0.5)
    old, new = made(), made()
    clip(new)

    def check(at):
        params = made()
        where = interrupted(lambda: clip(params), at)
        for p, before, after in zip(params, old, new, strict=True):
            assert torch.equal(p.grad, before.grad) or torch.equal(p.grad, after.grad), where
        others = copy.deepcopy(params)
        for p, other in zip(params, others, strict=True):
            other.grad = p.grad.clone()
        assert torch.equal(clip(params), in_another_thread(lambda: clip(others))), where
        for p, other in zip(params, others, strict=True):
            assert torch.equal(p.grad, other.grad), f"{where}: the next call"

    params = made()
    check_everywhere(check, points(lambda: clip(params), most))


@FEW
def test_an_operator(most):
    roles = ("param", "grad", "exp_avg", "exp_avg_sq")

    def made():
        tensors = [[t.detach().abs() for t in leaves(seed=k)] for k in range(4)]
        return dict(zip(roles, tensors, strict=True))

    def run(tensors):
        adamw_(**tensors, step=3, lr=0.1, weight_decay=0.1)

    old, new = made(), made()
    run(new)

    def check(at):
        tensors = made()
        where = interrupted(lambda: run(tensors), at)
        for k in range(len(tensors["param"])):
            kinds = {torch.equal(tensors[r][k], new[r][k]) for r in roles if r != "grad"}
            assert len(kinds) == 1, f"{where}: some tensors of the {k}-th are old, others new"
            assert kinds == {True} or all(torch.equal(tensors[r][k], old[r][k]) for r in roles), where
        again = made()
        run(again)
        assert all(torch.equal(x, y) for r in roles for x, y in zip(again[r], new[r], strict=True)), where

    tensors = made()
    check_everywhere(check, points(lambda: run(tensors), most))


@FEW
@pytest.mark.parametrize("is_first", [True, False])
def test_stepping_in_backward(is_first, most):
    make = functools.partial(fusedadam.AdamW, lr=1e-2, weight_decay=0.1)

    def made():
        model = Small()
        optimizer = fusedadam.step_in_backward(model, make)
        if not is_first:
            model(batch(0)).backward()
            optimizer.step()
        return model, optimizer

    old, (model, new) = made()[1], made()
    model(batch(1)).backward()
    before, after = values(old), values(new)

    def check(at):
        model, optimizer = made()
        loss = model(batch(1))
        where = interrupted(loss.backward, at)
        now = values(optimizer)
        for k in range(len(now)):
            assert_old_or_new([now[k]], [before[k]], [after[k]], True, f"{where}: parameter {k}")
        optimizer.zero_grad()
        optimizer.step()
        assert_same_values(values(optimizer), now, f"{where}: the end of the iteration has changed something")
        other, twin = reloaded(optimizer, make), Small()
        twin.load_state_dict(model.state_dict())
        twin(batch(2)).backward()
        for p, q in zip(params_of(other), twin.parameters(), strict=True):
            p.grad = q.grad
        model(batch(2)).backward()
        other.step()
        assert_same_values(values(optimizer), values(other), f"{where}: the next iteration")

    model, _ = made()
    check_everywhere(check, points(model(batch(1)).backward, most))


def same(optimizer, before):
    try:
        assert_unchanged(optimizer, before)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("kind", ["to a new optimizer", "to one that has stepped"])
def test_loading_a_state_dict_is_all_or_nothing(kind):
    make = functools.partial(fusedadam.EmaAdamW, state_dtype=BF16)
    saved = train(make(leaves(), lr=0.5), 2).state_dict()

    def made():
        optimizer = make(leaves(), lr=0.1)
        if "stepped" in kind:
            train(optimizer, 1)
        set_grads(params_of(optimizer), 7)
        return optimizer

    old, new = made(), made()
    new.load_state_dict(saved)
    old, new = everything(old), everything(new)

    def check(at):
        optimizer = made()
        where = interrupted(lambda: optimizer.load_state_dict(saved), at)
        assert same(optimizer, old) or same(optimizer, new), f"{where}: neither loaded nor as before"
        other = reloaded(optimizer, make)
        optimizer.step()
        other.step()
        assert_same_values(values(optimizer), values(other), f"{where}: the next step")
        assert not optimizer._optimizer_load_state_dict_pre_hooks, f"{where}: a hook is left"
        assert not optimizer._optimizer_load_state_dict_post_hooks, f"{where}: a hook is left"

    optimizer = made()
    check_everywhere(check, points(lambda: optimizer.load_state_dict(saved)))


def test_adding_a_group_is_all_or_nothing():
    def made():
        optimizer = train(fusedadam.AdamW(leaves(), lr=0.1), 1)
        params = leaves(seed=5)
        set_grads(params_of(optimizer) + params, 3)
        return optimizer, {"params": params, "lr": 0.3}

    old, _ = made()
    new, group = made()
    new.add_param_group(group)
    old, new = everything(old), everything(new)

    def check(at):
        optimizer, group = made()
        where = interrupted(lambda: optimizer.add_param_group(group), at)
        assert same(optimizer, old) or same(optimizer, new), f"{where}: neither added nor as before"
        if same(optimizer, old):
            assert list(group) == ["params", "lr"], f"{where}: the caller's group was changed"
            optimizer.add_param_group(group)
        optimizer.step()

    optimizer, group = made()
    check_everywhere(check, points(lambda: optimizer.add_param_group(group)))


def test_evaluating_the_average():
    def made():
        return train(fusedadam.EmaAdamW(leaves(), lr=0.1, ema_decay=0.5), 2)

    def evaluate(optimizer):
        with optimizer.ema_weights():
            pass

    before = everything(made())

    def check(at):
        optimizer = made()
        where = interrupted(lambda: evaluate(optimizer), at)
        assert same(optimizer, before), f"{where}: the trained weights are not back"
        assert not optimizer._has_averages, f"{where}: no step can be taken any more"
        assert_same(train(optimizer, 1, start=5), train(made(), 1, start=5))

    optimizer = made()
    check_everywhere(check, points(lambda: evaluate(optimizer)))
