"""Is a change of any tensor noticed? The compiled loop and plain Python must give the same answers."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import UserDict
from types import MappingProxyType

import pytest
import torch

import fusedadam
from fusedadam.engine.changes import internals, snapshot
from fusedadam.engine.changes.names import CHANGED, GRAD, MOVED, NO_GRAD, PARAM, SAME
from fusedadam.engine.changes.snapshot import Slot, Snapshot


@pytest.fixture(params=["compiled", "plain"])
def loop(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(snapshot, "prepare_loop", lambda: None)
    else:
        assert snapshot.prepare_loop() is not None, "torch and Numba here can serve the compiled loop"
        assert internals.find() is not None
    return request.param


def setting():
    params = [torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    for p in params[:2]:
        p.grad = torch.randn(4, 6)
    states = {p: {"exp_avg": torch.zeros(4, 6), "step": torch.tensor(0.0)} for p in params[:2]}
    slots = [Slot(k, what, k) for k in range(2) for what in (PARAM, GRAD, "exp_avg", "step")] + [Slot(2, NO_GRAD)]
    return params, states, slots


def new_address(params, states):
    params[0].data = params[0].data.clone()


def new_gradient(params, states):
    keep.append(params[1].grad)
    params[1].grad = torch.randn(4, 6)


def gradient_of_other_strides(params, states):
    params[0].grad = params[0].grad.t().contiguous().t()


def same_address_other_strides(params, states):
    """A freed gradient and a new one of another layout can share an address."""
    params[0].data = params[0].data.view(6, 4).t()


def same_address_other_shape(params, states):
    params[1].grad = None
    params[1].data = params[1].data.view(6, 4)
    params[1].grad = torch.randn(6, 4)


def other_dtype(params, states):
    params[0].grad = None
    params[0].data = params[0].data.double()
    params[0].grad = torch.randn(4, 6, dtype=torch.float64)


def gradient_gone(params, states):
    params[0].grad = None


def gradient_appears(params, states):
    params[2].grad = torch.randn(4, 6)


def state_replaced(params, states):
    states[params[0]]["exp_avg"] = torch.zeros(4, 6)


def step_replaced(params, states):
    """It is no longer a view of the optimizer's own counts."""
    states[params[0]]["step"] = torch.tensor(0.0)


def data_of_a_state_replaced(params, states):
    """As code that offloads states to the host does."""
    keep.append(states[params[1]]["exp_avg"].data)
    states[params[1]]["exp_avg"].data = torch.zeros(4, 6)


def state_removed(params, states):
    del states[params[1]]["exp_avg"]


def state_is_no_tensor(params, states):
    states[params[1]]["step"] = 3


def states_cleared(params, states):
    states.clear()


def states_reordered(params, states):
    first = next(iter(states))
    states[first] = states.pop(first)


def parameter_replaced(params, states):
    params[0] = torch.nn.Parameter(torch.randn(4, 6))


def parameters_swapped(params, states):
    params[0], params[1] = params[1], params[0]


def sparse_gradient(params, states):
    params[0].grad = torch.randn(4, 6).to_sparse()


def gradient_negated(params, states):
    """torch's negative bit: the same memory means something else, as in gradients of complex models."""
    params[0].grad = torch._neg_view(params[0].grad)


def state_negated(params, states):
    states[params[0]]["exp_avg"] = torch._neg_view(states[params[0]]["exp_avg"])


def gradient_of_zeros_without_memory(params, states):
    params[1].grad = torch._efficientzerotensor((4, 6))


def storage_emptied(params, states):
    params[1].grad.untyped_storage().resize_(0)


def storage_too_small(params, states):
    params[1].grad.untyped_storage().resize_(4 * 4 * 6 - 1)


def nothing(params, states):
    params[0].data.mul_(2)
    params[1].grad.add_(1)
    states[params[0]]["step"].add_(1)


keep = []
CHANGES = {
    nothing: SAME, new_address: MOVED, new_gradient: MOVED, gradient_of_other_strides: CHANGED,
    same_address_other_strides: CHANGED, same_address_other_shape: CHANGED, other_dtype: CHANGED,
    gradient_gone: CHANGED, gradient_appears: CHANGED, state_replaced: MOVED, state_removed: CHANGED,
    step_replaced: CHANGED, data_of_a_state_replaced: MOVED,
    state_is_no_tensor: CHANGED, states_cleared: CHANGED, states_reordered: CHANGED, parameter_replaced: CHANGED,
    parameters_swapped: CHANGED, sparse_gradient: CHANGED, gradient_negated: CHANGED, state_negated: CHANGED,
    gradient_of_zeros_without_memory: CHANGED, storage_emptied: CHANGED, storage_too_small: CHANGED,
}  # fmt: skip


@pytest.mark.parametrize(("change", "answer"), CHANGES.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_every_change_is_noticed(loop, change, answer):
    params, states, slots = setting()
    seen = Snapshot(slots, params, states)
    assert seen.compare(params, states)[0] == SAME
    change(params, states)
    assert seen.compare(params, states)[0] == answer
    if answer == MOVED:
        assert seen.addresses[6] == states[params[1]]["exp_avg"].data_ptr()
        assert seen.addresses[0] == params[0].data_ptr()
        assert seen.addresses[5] == params[1].grad.data_ptr()
        assert seen.compare(params, states)[0] == SAME


@pytest.mark.parametrize("dimensions", [5, 6, 16, 17])
def test_tensors_of_many_dimensions(loop, dimensions):
    """torch keeps the sizes of more than five elsewhere; beyond sixteen, plain Python has to look."""
    param = torch.nn.Parameter(torch.randn(2, 3, *[1] * (dimensions - 2)))
    param.grad = torch.randn_like(param)
    seen = Snapshot([Slot(0, PARAM), Slot(0, GRAD)], [param], {})
    assert seen.compare([param], {})[0] == SAME
    keep.append(param.grad)
    param.grad = torch.randn_like(param)
    assert seen.compare([param], {})[0] == MOVED
    assert seen.addresses[1] == param.grad.data_ptr()
    param.grad = param.grad.transpose(0, 1).contiguous().transpose(0, 1)
    assert seen.compare([param], {})[0] == CHANGED


def test_a_class_that_is_gone_is_not_mistaken_for_another(loop):
    """Classes are told apart by their addresses: one at the address of a freed one crashed the compiled loop."""
    param = torch.nn.Parameter(torch.ones(5))
    param.grad = torch.ones(5)
    optimizer = fusedadam.AdamW([param])
    optimizer.step()
    state, passing = optimizer.state[param], type("Passing", (torch.Tensor,), {})
    state["exp_avg"] = state["exp_avg"].as_subclass(passing)
    optimizer.step()
    address = id(passing)
    del state["exp_avg"], passing
    gc.collect()
    others = [type("Other", (), {}) for _ in range(3000)]
    state["exp_avg"] = next((other for other in others if id(other) == address), others[0])()
    with pytest.raises(TypeError, match="'exp_avg' is a Other"):
        optimizer.step()


@pytest.mark.parametrize("role", ["param", "exp_avg"])
def test_a_lazy_clone_is_not_written_through(loop, role):
    """Its memory is the original's until torch is asked for the address."""
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = fusedadam.AdamW([param], lr=0.1)
    for _ in range(3):
        param.grad = torch.ones(5)
        optimizer.step()
    original = torch.full((5,), 2.0)
    (param if role == "param" else optimizer.state[param][role]).data = torch._lazy_clone(original)
    optimizer.step()
    assert original.tolist() == [2.0] * 5
    assert (param if role == "param" else optimizer.state[param][role])[0] != 2.0


def test_no_gradient_and_no_state_is_kept_alive(loop):
    params, states, slots = setting()
    seen = Snapshot(slots, params, states)
    watched = [weakref.ref(params[0].grad), weakref.ref(states[params[0]]["exp_avg"])]
    seen.compare(params, states)
    params[0].grad = None
    states.clear()
    gc.collect()
    assert [w() for w in watched] == [None, None]


def test_what_was_looked_at_stays_as_long_as_the_caller_keeps_it(loop):
    """A kernel reads addresses: whatever another thread replaces meanwhile must not be freed."""
    params, states, slots = setting()
    seen = Snapshot(slots, params, states)
    _, tensors = seen.compare(params, states)
    watched = [weakref.ref(params[0].grad), weakref.ref(states[params[0]]["exp_avg"])]
    params[0].grad = None
    states.clear()
    gc.collect()
    assert [w() for w in watched] == [tensors[1], tensors[2]]
    assert len(tensors) == len(slots)
    assert tensors[-1] is None


def test_a_tensor_replaced_while_the_snapshot_is_made_is_noticed(loop):
    params, states, slots = setting()
    expected = list(snapshot.find(slots, params, states))
    assert Snapshot(slots, params, states, expected).is_of_expected
    params[0].grad = params[0].grad.clone()
    assert not Snapshot(slots, params, states, expected).is_of_expected


def test_references_are_not_leaked(loop):
    params, states, slots = setting()
    seen = Snapshot(slots, params, states)
    tensors = [params[0], params[0].grad, states[params[0]]["exp_avg"]]
    shared = [type(params[0]), type(params[0].grad), None]
    # Garbage of earlier tests refers to `shared` too: collect it now, and none of it in between.
    gc.collect()
    gc.disable()
    try:
        before = [sys.getrefcount(o) for o in tensors + shared]
        for _ in range(1000):
            seen.compare(params, states)
        change = [sys.getrefcount(o) - b for o, b in zip(tensors + shared, before, strict=True)]
    finally:
        gc.enable()
    # One reference too many, or too few, per look would make a thousand.
    assert all(abs(c) < 50 for c in change[: len(tensors)]), change
    assert all(abs(c) < 500 for c in change), change


def test_one_launch_whatever_the_number_of_groups_and_it_is_kept():
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(30)]
    optimizer = fusedadam.AdamW(
        [{"params": [p], "lr": 1e-3 * k, "weight_decay": 0.1 * k} for k, p in enumerate(params)]
    )
    for p in params:
        p.grad = torch.randn(5)
    optimizer.step()
    plan = optimizer._stepper.last_plan
    assert len(plan.launches) == 1
    for p in params:
        p.grad = torch.randn(5)
    optimizer.step()
    assert optimizer._stepper.last_plan is plan, "new gradients at other addresses do not make a new plan"
    params[3].grad = None
    optimizer.step()
    assert optimizer._stepper.last_plan is not plan


def rebuilt(state):
    values = dict(state)
    state.clear()
    state.update(reversed(values.items()))


def grown(state):
    for k in range(40):
        state[f"more {k}"] = k


def shrunk(state):
    for name in [name for name in state if name.startswith("more")]:
        del state[name]


def replaced(state):
    state["exp_avg"] = state["exp_avg"].clone()
    state["exp_avg_sq"] = state.pop("exp_avg_sq").clone()


DISTURBANCES = [rebuilt, grown, shrunk, replaced, lambda state: state.update(other=1), lambda state: state.pop("other")]


def test_states_are_found_wherever_their_dict_has_them(loop):
    """Each time the dict is the same object with the same values, but its entries are elsewhere."""
    ours, plain = ([torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(5))] for _ in range(2))
    optimizer, twin = fusedadam.AdamW(ours, lr=0.1), fusedadam.AdamW(plain, lr=0.1)
    for step, disturb in enumerate([lambda state: None] * 3 + DISTURBANCES * 2):
        for param in (*ours, *plain):
            param.grad = torch.full_like(param, step + 1.0)
        if step > 0:
            disturb(optimizer.state[ours[step % 2]])
            disturb(optimizer.state[ours[1 - step % 2]])
        optimizer.step()
        twin.step()
        for one, other in zip(ours, plain, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(optimizer.state[one]["exp_avg_sq"], twin.state[other]["exp_avg_sq"])


def test_a_step_increments_versions_by_one(loop):
    with torch.inference_mode():
        inference = torch.ones(3)
    params = [
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.nn.Parameter(torch.ones(4)),
        torch.nn.Parameter(torch.ones(1)),
    ]
    optimizer = fusedadam.AdamW([*params, inference])
    view = params[0].detach()
    for param in (params[0], params[1]):
        param.grad = torch.ones_like(param)
    with torch.inference_mode():
        inference.grad = torch.ones(3)
    before = [p._version for p in params]
    for step in range(1, 4):
        optimizer.step()
        assert [p._version - v for p, v in zip(params, before, strict=True)] == [step, step, 0]
        assert view._version == params[0]._version
    loss = (params[0] * params[0]).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_class_may_have_a_grad_of_its_own(loop):

    class Elsewhere(torch.nn.Parameter):
        @property
        def grad(self):
            return self.__dict__.get("mine")

        @grad.setter
        def grad(self, value):
            self.mine = value

    param, plain = Elsewhere(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer, twin = fusedadam.AdamW([param], lr=0.1, eps=1.0), fusedadam.AdamW([plain], lr=0.1, eps=1.0)
    for _ in range(3):
        param.grad, plain.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
        twin.step()
        assert torch.equal(param.detach(), plain.detach())


@pytest.mark.parametrize("other", [None, 1.5, object(), [torch.zeros(4, 6)] * 9, MappingProxyType({}), UserDict()])
def test_a_state_that_is_no_dict_is_not_read_as_one(loop, other):
    """Its memory was taken for a dict's, and the process crashed."""
    params, states, slots = setting()
    looked = Snapshot(slots, params, states)
    states[params[1]] = other
    try:
        assert looked.compare(params, states)[0] == CHANGED
    except (AttributeError, TypeError):
        assert loop == "plain"  # which lets Python refuse it


def test_a_look_and_an_increment_of_versions_do_not_disturb_each_other(loop):
    """Another thread may increment versions between any two lines of a look."""
    params, states, slots = setting()
    looked = Snapshot(slots, params, states)
    if looked.increment_versions is None:
        pytest.skip("torch increments versions")

    def trace(frame, event, arg):
        if frame.f_code.co_name == "look" and event == "line":
            looked.increment_versions()
        return trace

    params[1].grad = torch.randn(6, 4).t()
    sys.settrace(trace)
    try:
        answer, _ = looked.compare(params, states)
    finally:
        sys.settrace(None)
    assert answer == CHANGED
