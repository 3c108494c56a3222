"""torch_npu's and MindSpeed's optimizers follow torch's contract, without the limitations and bugs of the originals."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch

import fusedadam
from fusedadam import ascend
from fusedadam.ascend import FusedEmaAdamW, NpuFusedAdamP, NpuFusedAdamW, NpuFusedBertAdam, mindspeed
from tests.ascend.training import SHAPES, assert_same, leaves, params_of, set_grads, tensors, train
from tests.support import BF16, F16, F32, F64

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1}
CLASSES = {
    "AdamW": NpuFusedAdamW,
    "AdamP": NpuFusedAdamP,
    "BertAdam": functools.partial(NpuFusedBertAdam, warmup=0.3, t_total=9),
    "SGD": functools.partial(ascend.NpuFusedSGD, **MOMENTUM),
    "Adam": functools.partial(ascend.NpuFusedAdam, amsgrad=True),
    "Adadelta": ascend.NpuFusedAdadelta,
    "RMSprop": functools.partial(ascend.NpuFusedRMSprop, **MOMENTUM, centered=True),
    "RMSpropTF": functools.partial(ascend.NpuFusedRMSpropTF, **MOMENTUM, centered=True),
    "Lamb": ascend.NpuFusedLamb,
    "MindSpeed's EmaAdamW": FusedEmaAdamW,
    "MindSpeed's AdamW": mindspeed.AdamW,
    "MindSpeed's FusedTorchAdamW": ascend.FusedTorchAdamW,
}
EVERY = pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
pytestmark = pytest.mark.filterwarnings("ignore:NpuFusedBertAdam. b2 is not given")


@pytest.mark.parametrize("cls", [NpuFusedAdamW, NpuFusedAdamP, NpuFusedBertAdam, FusedEmaAdamW])
def test_it_can_be_rebuilt_from_its_defaults(cls):
    optimizer = cls(leaves(), lr=0.05, weight_decay=0.3)
    again = cls(leaves(), **optimizer.defaults)
    assert again.defaults == optimizer.defaults
    assert_same(train(again), train(optimizer))


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@EVERY
@pytest.mark.parametrize("dtypes", [(F32, F16), (BF16, F64)], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(cls, dtypes):
    whole = train(cls(leaves(dtypes), lr=0.05), 8)
    first = train(cls(leaves(dtypes), lr=0.05), 3)
    second = cls([torch.nn.Parameter(p.detach().clone()) for p in params_of(first)], lr=0.05)
    second.load_state_dict(saved(first))
    assert_same(train(second, 5, start=3), whole)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("back", [False, True], ids=["from torch", "to torch"])
def test_state_dicts_travel_between_it_and_torchs_adamw(amsgrad, back):
    options = {"lr": 0.05, "weight_decay": 0.1, "amsgrad": amsgrad}
    makers = [torch.optim.AdamW, NpuFusedAdamW][:: -1 if back else 1]
    first = train(makers[0](leaves((F64,)), **options), 3)
    second = makers[1]([torch.nn.Parameter(p.detach().clone()) for p in params_of(first)], **options)
    second.load_state_dict(saved(first))
    whole = train(torch.optim.AdamW(leaves((F64,)), **options), 6)
    assert_same(train(second, 3, start=3), whole, rtol=1e-12, atol=1e-14)


def test_a_state_dict_of_ours_goes_on_under_mindspeeds_name_and_back():
    options, names = {"lr": 0.05, "weight_decay": 0.1}, ({"ema_warmup": False}, {"use_num_updates": False})
    whole = train(fusedadam.EmaAdamW(leaves(), **names[0], **options), 6)
    part = train(fusedadam.EmaAdamW(leaves(), **names[0], **options), 2)
    for k, (cls, own) in enumerate(((FusedEmaAdamW, names[1]), (fusedadam.EmaAdamW, names[0])), 1):
        other = cls(params_of(part), **own, **options)
        other.load_state_dict(saved(part))
        part = train(other, 2, start=2 * k)
    assert_same(part, whole)


@EVERY
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_by_themselves(cls, copied):
    optimizer = train(cls(leaves(), lr=0.05), 2)
    twin, before = copied(optimizer), copy.deepcopy(tensors(optimizer))
    train(twin, 2, start=2)
    torch.testing.assert_close(tensors(optimizer), before, rtol=0, atol=0)
    assert_same(train(optimizer, 2, start=2), twin)


# torch_npu's constraint and its bugs, which are not ours


@EVERY
def test_parameters_and_gradients_may_be_reallocated(cls):
    still, moving = train(cls(leaves(), lr=0.05), 5), cls(leaves(), lr=0.05)
    old = []  # a mistake reads what is still there, and is seen
    for step in range(5):
        train(moving, 1, start=step)
        old += [(p.data, p.grad) for p in params_of(moving)]
        for p in params_of(moving):
            p.grad, p.data = None, p.data.clone()
    assert len({data.data_ptr() for data, _ in old}) == 5 * len(SHAPES)
    assert_same(moving, still)


@EVERY
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(cls):
    param = torch.nn.Parameter(torch.full((3, 3), 2.0))
    optimizer = cls([param], lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 36.0
    optimizer.step(closure)  # a warm-up begins with a rate of 0
    assert (param < 2).all()


@EVERY
def test_each_parameter_has_its_own_count(cls):
    """In torch_npu the first one's is the whole group's, and one without a gradient in the first step is forgotten."""
    optimizer = train(cls(leaves(), lr=0.05), 6, missing=lambda step: {0} if step % 2 else {1})
    for k, p in enumerate(params_of(optimizer)):
        alone = cls(leaves()[k : k + 1], lr=0.05)
        for step in range(6):
            if k != (0 if step % 2 else 1):
                own = leaves()
                set_grads(own, step)
                params_of(alone)[0].grad = own[k].grad
                alone.step()
        torch.testing.assert_close(p, params_of(alone)[0], rtol=0, atol=0)
        assert float(optimizer.state[p]["step"]) == (3 if k < 2 else 6)


@EVERY
def test_a_state_dict_that_is_loaded_after_a_step_counts(cls):
    """In torch_npu it is ignored then."""
    other = train(cls(leaves(), lr=0.05), 5)
    optimizer = train(cls(leaves(), lr=0.2), 1)
    with torch.no_grad():
        for p, q in zip(params_of(optimizer), params_of(other), strict=True):
            p.copy_(q)
    optimizer.load_state_dict(other.state_dict())
    assert_same(train(optimizer, 2, start=5), train(other, 2, start=5))


def test_the_schedules_place_is_saved():
    """torch_npu's is not: a resumed training warms up anew."""
    optimizer = train(NpuFusedBertAdam(leaves(), lr=0.1, warmup=0.5, t_total=8), 3)
    again = NpuFusedBertAdam(leaves(), lr=0.1, warmup=0.5, t_total=8)
    again.load_state_dict(saved(optimizer))
    assert again.get_lr() == optimizer.get_lr() == pytest.approx([0.1 * 3 / 4] * len(SHAPES))
