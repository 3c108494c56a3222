"""Stepping in backward: the bits of ``step()``, with few gradients alive at any time."""

from __future__ import annotations

import copy
import functools
import io
import math

import pytest
import torch
from torch.optim import lr_scheduler

import fusedadam
from fusedadam import AdamW, step_in_backward
from tests.contract.common import (
    CLIPPED,
    EVERY_PLAIN,
    PLAIN,
    Small,
    assert_same,
    assert_unchanged,
    batch,
    everything,
    params_of,
)
from tests.support import F32, F64

BERT_ALONE = functools.partial(fusedadam.BertAdam, lr=1e-2, max_grad_norm=0.05)
ALONE = PLAIN | {
    "BertAdam clipped by parameter": BERT_ALONE,
    "AdamP with nesterov": functools.partial(fusedadam.AdamP, lr=1e-2, weight_decay=0.1, delta=5.0, nesterov=True),
    "eagerly": functools.partial(fusedadam.AdamW, lr=1e-2, backend="eager"),
    "a float64 average": functools.partial(fusedadam.EmaAdamW, lr=1e-2, ema_dtype=F64),
}
EVERY = pytest.mark.parametrize("make", ALONE.values(), ids=ALONE)


def train(model, optimizer, steps, start=0, after=lambda: None):
    """The loop that everybody writes."""
    for step in range(start, start + steps):
        model(batch(step, next(model.parameters()).dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
    return optimizer


def pair(make, model=Small):
    """A model that steps in backward and one that does not, with their optimizers."""
    models = model(), model()
    return models, (step_in_backward(models[0], make), make(list(models[1].parameters())))


def assert_alike(make, loop, model=Small):
    """The bits of ``step()``, after the same loop over model and optimizer."""
    models, optimizers = pair(make, model)
    for own, optimizer in zip(models, optimizers, strict=True):
        loop(own, optimizer)
    assert_same(*optimizers)


def five_steps(model, optimizer):
    train(model, optimizer, 5)
    assert all(state["step"] == 5 for state in optimizer.state.values())


@EVERY
@pytest.mark.parametrize(("dtype", "backend"), [(F32, None), (torch.bfloat16, "eager")], ids=str)
def test_it_gives_the_bits_of_step(make, dtype, backend):
    assert_alike(functools.partial(make, backend=backend), five_steps, functools.partial(Small, dtype))


class Deep(torch.nn.Module):
    """One parameter after the other, so that backward meets them one after the other."""

    def __init__(self, depth=12):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


@EVERY
def test_gradients_never_exist_all_at_once(make):
    """What it is for: the gradient of a parameter is let go before most others are made."""
    model = Deep()
    params, alive = list(model.parameters()), []
    for p in params:  # before the optimizer's own hook, which lets the gradient go
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(q.grad is not None for q in params)))
    optimizer = step_in_backward(model, make)
    for _ in range(2):
        model(torch.ones(2, 8)).backward()
        assert all(p.grad is None for p in params)
        optimizer.step()
    assert len(alive) == 2 * len(params)
    assert max(alive) == 1


def test_gradients_are_freed_and_not_only_let_go():
    """Nothing else holds on to their memory either: no table, no snapshot."""
    from torch.multiprocessing.reductions import StorageWeakRef

    model, watched = Deep(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda q: watched.append(StorageWeakRef(q.grad.untyped_storage())))
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    for _ in range(2):
        model(torch.ones(2, 8)).backward()
        assert all(ref.expired() for ref in watched)
        optimizer.step()
    assert len(watched) == 24


def under_a_scheduler(model, optimizer):
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=False)
    train(model, optimizer, 6, after=scheduler.step)


def with_options_that_change(model, optimizer):
    for change in (
        {"lr": torch.tensor(0.05, dtype=F64)}, {"weight_decay": 0.3}, {"lr": 0.01}, {"backend": "eager"},
    ):  # fmt: skip
        optimizer.param_groups[0].update(change)
        train(model, optimizer, 2)


def with_a_group_that_is_added_later(model, optimizer):
    """It is left to ``step()``."""
    more = torch.nn.Parameter(torch.ones(3, 4))
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": [more], "lr": 0.3})
    for step in range(2, 5):
        (model(batch(step)) + more.square().sum()).backward()
        assert more.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[more]["step"] == 3


@EVERY_PLAIN
@pytest.mark.parametrize(
    "loop",
    [under_a_scheduler, with_options_that_change, with_a_group_that_is_added_later],
    ids=lambda loop: loop.__name__,
)
def test_loops_give_the_bits_of_step(make, loop):
    assert_alike(make, loop)


def with_a_closure_that_runs_backward(model, optimizer):
    for k in range(3):

        def closure(k=k):
            optimizer.zero_grad()
            loss = model(batch(k))
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0


def with_a_loss_that_reaches_only_some(model, optimizer):
    train(model, optimizer, 1)
    for _ in range(2):
        model.last(torch.ones(1, 12)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    train(model, optimizer, 1)
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [2, 2, 2, 2, 4, 4]


def with_a_gradient_that_is_set_by_hand(model, optimizer):
    """It is left to ``step()``."""
    for _ in range(2):
        train(model, optimizer, 1)
        model.last.bias.grad = torch.ones(4)
        optimizer.step()
        optimizer.zero_grad()


def with_parameters_that_move(model, optimizer):
    train(model, optimizer, 2)
    for p in model.parameters():
        p.data = p.data.clone()
    model.double()
    for state in optimizer.state.values():
        state.update({k: v.clone() for k, v in state.items()})
    train(model, optimizer, 2)


def with_states_that_are_cleared(model, optimizer):
    """They begin anew, as without it: see the changes in tests/contract/test_base.py."""
    train(model, optimizer, 2)
    optimizer.state.clear()
    train(model, optimizer, 2)


def with_a_loss_in_two_parts(model, optimizer):
    """They share nothing, so this is no accumulation."""
    for _ in range(2):
        model.last(torch.ones(1, 12)).sum().backward()
        model.norm(torch.ones(1, 12) * torch.arange(12.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("AdamW", with_a_closure_that_runs_backward),
        ("AdamP", with_a_loss_that_reaches_only_some),
        ("EmaAdamW", with_a_gradient_that_is_set_by_hand),
        ("AdamW", with_parameters_that_move),
        ("AdamW", with_states_that_are_cleared),
        ("AdamW", with_a_loss_in_two_parts),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_unusual_loops_give_the_bits_of_step(name, loop):
    assert_alike(PLAIN[name], loop)


@EVERY_PLAIN
def test_state_dicts_are_saved_and_loaded_in_the_middle(make):
    """Into an optimizer that has stepped already, which must then forget what it knew; and from one kind to another."""
    straight = Small()
    expected = train(straight, make(list(straight.parameters())), 6)
    first = Small()
    optimizer = train(first, step_in_backward(first, make), 3)
    file = io.BytesIO()
    torch.save((first.state_dict(), optimizer.state_dict()), file)
    for kind in (step_in_backward, lambda model, make: make(list(model.parameters()))):
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        second = Small()
        resumed = train(second, kind(second, make), 2)
        second.load_state_dict(weights)
        resumed.load_state_dict(state)
        train(second, resumed, 3, start=3)
        assert_same(resumed, expected)


def with_one_frozen():
    model = Small()
    model.convolution.weight.requires_grad_(False)
    return model


def that_freezes_another_one_later(model, optimizer):
    """What was frozen at first is left to ``step()``."""
    before = model.convolution.weight.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(model.convolution.weight, before)
    model.convolution.weight.requires_grad_(True)
    model.last.bias.requires_grad_(False)
    train(model, optimizer, 2, start=2)
    assert not torch.equal(model.convolution.weight, before)
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [2, 4, 4, 4, 4, 2]


@EVERY_PLAIN
def test_frozen_parameters_stay_and_are_left_to_step_once_they_are_not(make):
    assert_alike(make, that_freezes_another_one_later, with_one_frozen)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x.flatten(1)[:, :6]).tanh()).square().mean()


@EVERY_PLAIN
def test_tied_parameters_step_once_with_their_whole_gradient(make):
    assert_alike(make, five_steps, Tied)


def grouped(make):
    def build(params):
        params = list(params)
        return make([{"params": params[:2], "lr": 0.2, "weight_decay": 0.0}, {"params": params[2:], "lr": 0.01}])

    return build


@EVERY_PLAIN
def test_groups_have_their_own_options(make):
    def loop(model, optimizer):
        train(model, optimizer, 2)
        optimizer.param_groups[1]["lr"] = 0.07
        train(model, optimizer, 2, start=2)

    assert_alike(grouped(make), loop)


# EMA


def test_the_average_can_be_used_and_a_backward_meanwhile_is_refused():
    """Its steps would be lost when the trained weights come back; the model is as it was afterwards."""
    models, optimizers = pair(PLAIN["EmaAdamW"])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    model, optimizer = models[0], optimizers[0]
    with optimizer.ema_weights():
        assert torch.equal(model.last.weight, optimizer.state[model.last.weight]["ema_params"])
        model(batch(7)).item()
        loss = model(batch(8))
        with pytest.raises(RuntimeError, match="ema_weights"):
            loss.backward()
    assert_same(*optimizers)
    optimizer.zero_grad()  # those of the backward that was refused
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2, start=3)
    assert_same(*optimizers)
    averaged = optimizers[0].ema_state_dict(models[0])
    assert_same(averaged, optimizers[1].ema_state_dict(models[1]))


def test_projections_are_those_of_step():
    """Each parameter's own step has its own report."""
    make = functools.partial(fusedadam.AdamP, lr=1e-2, delta=0.8)
    models, optimizers = pair(make)
    assert optimizers[0].projections() == {}
    seen = set()
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        mine, theirs = ([*optimizer.projections().values()] for optimizer in optimizers)
        assert mine == theirs
        seen.update(mine)
    assert len(seen) > 1, "the test projects nothing"


# what is refused


@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_by_a_norm_over_several_parameters_is_refused(name):
    model = Small()
    with pytest.raises(ValueError, match="max_grad_norm"):
        step_in_backward(model, CLIPPED[name])
    model(batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters()), "a refused one has left hooks behind"


def test_one_group_that_clips_is_enough():
    def make(params):
        return fusedadam.AdamW([{"params": params[:1]}, {"params": params[1:], "max_grad_norm": 1.0}])

    with pytest.raises(ValueError, match="max_grad_norm"):
        step_in_backward(Small(), make)


def later_in_the_group(optimizer):
    optimizer.param_groups[0]["max_grad_norm"] = 0.01


def later_from_a_state_dict(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["max_grad_norm"] = 0.01
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("change", [later_in_the_group, later_from_a_state_dict])
def test_clipping_that_is_asked_for_later_is_refused_too(change):
    model = Small()
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)

    def go_on():
        change(optimizer)
        train(model, optimizer, 1)

    with pytest.raises((ValueError, RuntimeError), match="max_grad_norm"):
        go_on()


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_grad_scaler_is_refused_by_its_step(unscaled):
    model = Small()
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(batch(0))).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"steps in backward.*bfloat16"):
        scaler.step(optimizer)


def test_gradients_that_accumulate_are_refused_before_anything_is_written():
    """A second backward before step() would count twice."""
    model = Small()
    optimizer = step_in_backward(model, PLAIN["EmaAdamW"])
    model(batch(0)).backward()
    before = copy.deepcopy([p.detach() for p in params_of(optimizer)])
    with pytest.raises(
        RuntimeError, match=r"a second gradient before optimizer.step\(\).*backward\(\) was called again"
    ):
        model(batch(1)).backward()
    assert_same([p.detach() for p in params_of(optimizer)], before)
    optimizer.zero_grad()
    optimizer.step()
    assert_same([p.detach() for p in params_of(optimizer)], before)
    train(model, optimizer, 1)
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_gradients_that_come_back_after_backward_are_refused_before_anything_is_written():
    """As DistributedDataParallel puts them back when it has added them up. The wrapper cannot be seen; this can."""
    model = Small()
    optimizer = step_in_backward(model, PLAIN["AdamW"])
    model(batch(0)).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=r"has a gradient again.*DistributedDataParallel"):
        optimizer.step()
    assert_unchanged(optimizer, before)


def test_an_optimizer_of_torchs_is_refused():
    model = Small()
    with pytest.raises(TypeError, match="make_optimizer returned a AdamW; it must return an optimizer of fusedadam"):
        step_in_backward(model, torch.optim.AdamW)
    with pytest.raises(TypeError, match="NoneType"):
        step_in_backward(model, lambda params: None)
    model(batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_gradient_that_cannot_be_used_is_refused_and_the_next_one_is_not():
    """A sparse one: the error comes out of backward, and names it."""
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = step_in_backward(embedding, PLAIN["AdamW"])
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        embedding(torch.tensor([1])).sum().backward()
    assert torch.equal(embedding.weight, before)
    optimizer.zero_grad()
    embedding.sparse = False
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert optimizer.state[embedding.weight]["step"] == 1
    assert math.isfinite(embedding.weight.sum().item())


class OutOfMemory(Exception):
    pass


def fails_in_backward(model, optimizer, step):
    """Some parameters have been updated when the exception comes."""
    hook = model.convolution.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(OutOfMemory))
    with pytest.raises(OutOfMemory):
        model(batch(step)).backward()
    hook.remove()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_ends_an_iteration_that_broke_off(set_to_none):
    """How people skip a batch that ran out of memory: the next backward was refused."""
    model = Small()
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)
    fails_in_backward(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=set_to_none)
    train(model, optimizer, 2)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3, 4}, "some took part in what broke off"


def test_what_the_errors_advise_works():
    model = Small()
    optimizer = train(model, step_in_backward(model, PLAIN["AdamW"]), 1)
    fails_in_backward(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"after one that failed, optimizer.zero_grad\(\)"):
        model(batch(2)).backward()
    with pytest.raises(RuntimeError, match=r"from a second backward\(\).*optimizer.zero_grad\(\) to drop it"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    fails_in_backward(model, optimizer, 1)
    optimizer.step()  # or go on without the rest of the gradients
    train(model, optimizer, 1)


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_parameter_follows_the_group_that_has_it_now(in_backward):
    """It kept the options of the group that had it in the first step."""
    model = torch.nn.Linear(4, 3)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.0}]
    optimizer = step_in_backward(model, lambda _: AdamW(groups)) if in_backward else AdamW(groups)
    before = model.bias.detach().clone()
    for moved in (False, True):
        if moved:
            first, second = optimizer.param_groups
            first["params"], second["params"] = [model.weight, model.bias], []
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.bias, before) != moved


def test_a_parameter_that_no_group_has_is_left_alone():
    model = torch.nn.Linear(4, 4)
    optimizer = step_in_backward(model, AdamW)
    optimizer.param_groups[0]["params"] = [model.weight]
    before = model.bias.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(model.bias, before)
    assert model.bias.grad is not None


def test_muon_is_refused_for_matrices_and_stepped_for_the_rest():
    model = torch.nn.Linear(2, 3)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="each would keep memory for its own products of matrices; use optimizer"):
        step_in_backward(model, lambda params: fusedadam.Muon(params, use_muon=None))
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None, "the model has no hooks"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step_in_backward(model, lambda params: fusedadam.Muon(params, use_muon=False))
