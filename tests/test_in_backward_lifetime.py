"""How long stepping in backward lasts: as long as its optimizer, until it is stopped, and on in copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedadam
from fusedadam import step_in_backward
from fusedadam.tensors.side_stream import SideStream
from tests.contract.common import EVERY_PLAIN, PLAIN, Small, assert_same, assert_unchanged, batch, everything, params_of
from tests.test_in_backward import assert_alike, five_steps, pair, train


def frees(model, step=0):
    """Whether a backward pass of the model uses gradients up."""
    model(batch(step)).backward()
    return all(p.grad is None for p in model.parameters())


def hooks_on(model):
    return sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


def test_model_and_optimizer_are_freed():
    """Python's garbage collector does not see into hooks of tensors: none was ever freed."""
    alive = []
    for _ in range(3):
        model = Small()
        optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 2)
        alive += map(weakref.ref, (model, optimizer, *model.parameters()))
    del model, optimizer
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_an_optimizer_that_is_gone_leaves_the_model_as_it_was_without_it():
    model, twin = Small(), Small()
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)
    twin.load_state_dict(model.state_dict())
    del optimizer  # without the garbage collector: at once
    assert hooks_on(model) == 0
    for step in range(2):
        for one in (model, twin):
            one(batch(step)).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    second = train(model, step_in_backward(model, PLAIN["AdamW"]), 0)
    second.zero_grad()
    assert frees(model)


@pytest.mark.parametrize("ends", ["deleted", "stopped", "replaced"])
def test_what_a_failed_backward_has_begun_is_waited_for_at_the_end(ends, monkeypatch):
    """Steps beside the model went on with memory that was free by then."""
    model, joined = Small(), []
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    begun = optimizer._in_backward._side
    monkeypatch.setattr(SideStream, "join", lambda side: joined.append(side))
    if ends == "deleted":
        del optimizer  # without the garbage collector: at once
    elif ends == "stopped":
        optimizer.stop_in_backward()
    else:
        step_in_backward(model, PLAIN["AdamW"])
    assert begun in joined


def test_a_model_that_is_gone_leaves_the_optimizer_as_it_is():
    model = Small()
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)
    del model
    gc.collect()
    before = everything(optimizer)
    optimizer.step()
    assert_unchanged(optimizer, before)


@EVERY_PLAIN
def test_it_can_be_stopped_and_resumed(make):
    """States, options and weights go on as if nothing had happened."""
    models, optimizers = pair(make)
    model, optimizer = models[0], optimizers[0]
    train(model, optimizer, 2)
    optimizer.stop_in_backward()
    assert hooks_on(model) == 0
    assert not frees(model)
    optimizer.zero_grad()
    train(model, optimizer, 2, start=2)
    assert step_in_backward(model, lambda params: optimizer) is optimizer
    assert frees(model, 4)
    optimizer.step()
    train(model, optimizer, 1, start=5)
    train(models[1], optimizers[1], 6)
    assert_same(*optimizers)


def test_stopping_twice_or_without_need_does_nothing():
    model = Small()
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    for _ in range(2):
        optimizer.stop_in_backward()
    fusedadam.AdamW(Small().parameters()).stop_in_backward()
    assert not frees(model)


def test_once_stopped_gradients_may_accumulate_and_be_scaled():
    models, optimizers = pair(PLAIN["AdamW"])
    optimizers[0].stop_in_backward()
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            scaler.scale(model(batch(step))).backward()
        scaler.step(optimizer)
    assert_same(*optimizers)


def test_it_can_be_registered_again_while_it_is_at_work():
    model = Small()
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)
    step_in_backward(model, lambda params: optimizer)
    train(model, optimizer, 2)
    assert hooks_on(model) == len(params_of(optimizer))
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_another_optimizer_takes_over():
    model = Small()
    first = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)
    second = step_in_backward(model, PLAIN["Adam"])
    train(model, second, 2)
    assert hooks_on(model) == len(params_of(second))
    assert all(state["step"] == 1 for state in first.state.values())
    assert all(state["step"] == 2 for state in second.state.values())


# copies


def saved_and_loaded(both):
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both)), "save": saved_and_loaded}


@EVERY_PLAIN
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_steps_in_its_own_backward(make, copied):
    """It went on, but without freeing gradients: torch copies no hooks."""
    model = Small()
    optimizer = train(model, step_in_backward(model, make), 2)
    twin_model, twin = COPIES[copied]((model, optimizer))
    before = everything(optimizer)
    assert frees(twin_model, 2)
    assert_unchanged(optimizer, before)
    twin.step()
    train(twin_model, twin, 1, start=3)
    train(model, optimizer, 2, start=2)
    assert_same(optimizer, twin)
    twin_model(batch(0)).backward()
    with pytest.raises(RuntimeError, match="a second gradient"):
        twin_model(batch(0)).backward()


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_leaves_to_step_what_the_original_does(copied):
    """Groups that were added later, and parameters that were frozen at the beginning or are now."""
    model = Small()
    model.convolution.weight.requires_grad_(False)
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)
    model.convolution.weight.requires_grad_(True)
    model.norm.weight.requires_grad_(False)
    model.extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [model.extra]})
    twin_model, twin = COPIES[copied]((model, optimizer))
    for one, its in ((model, optimizer), (twin_model, twin)):
        (one(batch(1)) + one.extra.square().sum()).backward()
        assert [name for name, p in one.named_parameters() if p.grad is not None] == ["extra", "convolution.weight"]
        its.step()
    assert_same(optimizer, twin)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_the_optimizer_alone_has_parameters_of_its_own(copied):
    model = Small()
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 2)
    twin = COPIES[copied](optimizer)
    before = everything(twin)
    train(model, optimizer, 2)
    assert_unchanged(twin, before)
    for p in params_of(twin):
        p.grad = torch.ones_like(p)
    twin.step()
    assert all(state["step"] == 3 for state in twin.state.values())


def test_a_shallow_copy_has_the_same_parameters_and_leaves_them_to_the_original():
    model = Small()
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    twin = copy.copy(optimizer)
    train(model, optimizer, 2)
    assert all(state["step"] == 2 for state in optimizer.state.values())
    twin.stop_in_backward()
    assert frees(model)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_one_that_was_stopped_does_not_begin_again(copied):
    model = Small()
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    optimizer.stop_in_backward()
    twin_model, _twin = COPIES[copied]((model, optimizer))
    assert not frees(twin_model)


def test_a_copy_of_the_model_alone_is_a_plain_model():
    """As for an average, or for a teacher."""
    model = Small()
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    assert not frees(copy.deepcopy(model))
    train(model, optimizer, 1)


# checkpointing


class Shared(torch.nn.Module):
    """One block, called twice, each time under a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.reentrant = torch.nn.Linear(6, 6), reentrant

    def forward(self, x):
        x = x.flatten(1)[:, :6].clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda x: self.block(x).tanh(), x, use_reentrant=self.reentrant)
        return x.square().mean()


def test_reentrant_checkpoints_of_a_shared_block_are_refused_with_their_name_and_the_remedy():
    """Each runs a backward of its own; the error blamed a second backward() of the user's."""
    model = Shared(reentrant=True)
    _optimizer = step_in_backward(model, PLAIN["AdamW"])
    with pytest.raises(RuntimeError, match=r"use_reentrant=True.*shared block.*use_reentrant=False"):
        model(batch(0)).backward()


def test_the_remedy_helps():
    assert_alike(PLAIN["AdamW"], five_steps, lambda: Shared(reentrant=False))
