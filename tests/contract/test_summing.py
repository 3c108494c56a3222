"""The optimizers that sum keep torch's contract as the others do: resuming, copying, groups, options, refusals."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch

import fusedadam
from fusedadam.engine import launch
from fusedadam.tensors import layout
from tests.support import F32

MAKERS = {
    "AdamP": functools.partial(fusedadam.AdamP, lr=1e-2, weight_decay=0.1),
    "AdamP clipped": functools.partial(fusedadam.AdamP, lr=1e-2, weight_decay=0.1, nesterov=True, max_grad_norm=1.0),
    "BertAdam": functools.partial(fusedadam.BertAdam, lr=1e-2, warmup=0.3, t_total=20),
    "BertAdam by group": functools.partial(fusedadam.BertAdam, lr=1e-2, clip="group"),
    "AdamW clipped": functools.partial(fusedadam.AdamW, lr=1e-2, max_grad_norm=1.0),
    "EmaAdamW clipped": functools.partial(fusedadam.EmaAdamW, lr=1e-2, max_grad_norm=1.0),
}
EVERY = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def leaves(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in [(4, 6), (7,), (3, 2, 3, 3), ()]]


def train(optimizer, steps, start=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in params]


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@EVERY
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(make):
    whole = train(make(leaves()), 9)
    first = make(leaves())
    params = train(first, 4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make([torch.nn.Parameter(p) for p in params])
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(train(second, 5, start=4), whole)


@EVERY
def test_copies_go_on_by_themselves(make):
    optimizer = make(leaves())
    train(optimizer, 2)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = train(optimizer, 2, start=2)
    for other in copies:
        assert_equal(train(other, 2, start=2), expected)


@EVERY
def test_it_can_be_rebuilt_from_its_defaults(make):
    optimizer = make(leaves())
    again = type(optimizer)(leaves(), **optimizer.defaults)
    assert_equal(train(again, 2), train(optimizer, 2))


@EVERY
def test_how_parameters_are_grouped_changes_no_bit(make):
    if "group" in str(make.keywords):
        pytest.skip("the group is what is summed over")
    together, apart = make(leaves()), make([{"params": [p]} for p in leaves()])
    assert_equal(train(apart, 3), train(together, 3))


@EVERY
def test_groups_have_their_own_options_and_may_be_added_later(make):
    params = leaves()
    optimizer = make(params[:2])
    train(optimizer, 1)
    optimizer.add_param_group({"params": params[2:], "lr": 0.0, "weight_decay": 0.0})
    before = [p.detach().clone() for p in params]
    after = train(optimizer, 1, start=1)
    assert_equal(after[2:], before[2:])
    assert not torch.equal(after[0], before[0])


@EVERY
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(make):
    (param,) = params = [torch.nn.Parameter(torch.ones(3, 3))]
    optimizer = make(params)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0


@EVERY
def test_the_gradient_is_not_changed(make):
    optimizer = make(leaves())
    train(optimizer, 1)
    before = [p.grad.clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.step()
    assert_equal([p.grad for p in optimizer.param_groups[0]["params"]], before)


def test_norms_that_are_kept_do_not_change_later():
    optimizer = fusedadam.AdamW(leaves(), max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    norms = []
    for step in range(3):
        train(optimizer, 1, start=step)
        norms.append(optimizer.grad_norm)
    assert len({norm.item() for norm in norms}) == 3
    assert all(norm.dim() == 0 and norm.dtype == F32 for norm in norms)
    assert fusedadam.AdamW(leaves()).grad_norm is None


@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (fusedadam.AdamP, {"delta": -1.0}, "delta"),
        (fusedadam.AdamP, {"wd_ratio": float("nan")}, "wd_ratio"),
        (fusedadam.AdamP, {"nesterov": 1}, "nesterov"),
        (fusedadam.AdamP, {"betas": (0.9, 1.0)}, "betas"),
        (fusedadam.AdamP, {"max_grad_norm": -2.0}, "max_grad_norm"),
        (fusedadam.AdamW, {"max_grad_norm": "1"}, "max_grad_norm"),
        (fusedadam.AdamW, {"max_grad_norm": -1}, "max_grad_norm"),
        (fusedadam.EmaAdamW, {"max_grad_norm": float("nan")}, "max_grad_norm"),
        (fusedadam.BertAdam, {"t_total": 0}, "t_total"),
        (fusedadam.BertAdam, {"clip": "layer"}, "clip"),
        (fusedadam.BertAdam, {"schedule": None}, "schedule"),
    ],
)
def test_bad_options_are_refused_by_name(make, options, names):
    with pytest.raises((ValueError, TypeError), match=names):
        make(leaves(), **options)


def test_infinity_takes_the_norm_and_clips_nothing():
    clipped, plain = fusedadam.AdamW(leaves(), max_grad_norm=float("inf")), fusedadam.AdamW(leaves())
    assert_equal(train(clipped, 2), train(plain, 2))
    grads = [p.grad.clone() for p in clipped.param_groups[0]["params"]]
    norm = fusedadam.clip_grad_norm_(clipped.param_groups[0]["params"], float("inf"), foreach=True)
    assert torch.equal(norm, clipped.grad_norm)
    assert_equal([p.grad for p in clipped.param_groups[0]["params"]], grads)


def test_a_call_that_failed_leaves_nothing_that_a_later_one_writes_back(monkeypatch):
    """Copies of odd layouts are written back at the end: after a failure, not by the next call."""

    def gradients(value):
        params = [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
        for p in params:
            p.grad = torch.full((4, 8), value)[:, ::2]
        return params

    fusedadam.clip_grad_norm_(gradients(1.0), 1.0)
    failing, calls = gradients(5.0), []

    def copy_once(tensor, strides):
        calls.append(tensor)
        if len(calls) == 2:
            raise MemoryError
        return layout.copy_with(tensor, strides)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "copy_with", copy_once)
        with pytest.raises(MemoryError):
            fusedadam.clip_grad_norm_(failing, 1.0)
    for p in failing:
        p.grad.zero_()
    fusedadam.clip_grad_norm_(gradients(1.0), 1.0)
    assert all(p.grad.eq(0).all() for p in failing)


def test_a_step_that_failed_before_it_wrote_does_not_count(monkeypatch):
    param = torch.nn.Parameter(torch.zeros(4, 4))
    param.grad = torch.ones(4, 8)[:, ::2]
    optimizer = fusedadam.AdamW([param], max_grad_norm=1.0)
    optimizer.step()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(launch, "copy_with", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert optimizer.state[param]["step"] == 1
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("norm_type", [0, -1, float("nan"), float("-inf")])
def test_clip_grad_norm_refuses_what_is_no_norm(norm_type):
    with pytest.raises(ValueError, match="norm_type"):
        fusedadam.clip_grad_norm_(leaves(), 1.0, norm_type=norm_type)


def test_clip_grad_norm_notices_gradients_that_moved_or_changed_their_shape():
    for size in (3, 5, 3, 4, 6, 7, 3):
        param = torch.nn.Parameter(torch.zeros(size))
        param.grad = torch.full((size,), 2.0)
        assert fusedadam.clip_grad_norm_([param], 1.0).item() == pytest.approx(2 * size**0.5)
        assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
