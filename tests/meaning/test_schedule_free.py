"""Schedule-Free AdamW, against the paper's formulas written out by hand and the authors' package; train and eval."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fusedadam
from fusedadam import ScheduleFreeAdamW
from tests.meaning.against_torch import parameters, params_of, train, trained_beside
from tests.meaning.by_hand import ScheduleFreeByHand
from tests.support import BF16, F32, QUICK_PLACES

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
CLOSE = {"rtol": 1e-11, "atol": 1e-13}


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("more", [{}, {"warmup_steps": 6}, {"warmup_steps": 40, "maximize": True}], ids=str)
def test_equals_the_formula_by_hand(more, place):
    optimizer, by_hand = trained_beside(ScheduleFreeAdamW, ScheduleFreeByHand, place, {**OPTIONS, **more})
    for p, expected in by_hand.items():
        torch.testing.assert_close(p.detach().cpu(), expected.p, **CLOSE)
        torch.testing.assert_close(optimizer.state[p]["z"].cpu(), expected.z, **CLOSE)
    optimizer.eval()
    for p, expected in by_hand.items():
        torch.testing.assert_close(p.detach().cpu(), expected.x, **CLOSE)


def theirs(params, warmup_steps=0):
    schedulefree = pytest.importorskip("schedulefree")
    optimizer = schedulefree.AdamWScheduleFree(params, **OPTIONS, warmup_steps=warmup_steps)
    optimizer.train()
    return optimizer


@pytest.mark.parametrize("warmup", [0, 6])
def test_equals_the_authors_and_goes_on_from_their_state_dict(warmup):
    def step(optimizers, number):
        for optimizer in optimizers:
            for k, p in enumerate(params_of(optimizer)):
                generator = torch.Generator().manual_seed(100 * number + k)
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            optimizer.step()

    def assert_close(one, other):
        for p, q in zip(params_of(one), params_of(other), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)

    original = theirs(parameters(), warmup)
    ours = ScheduleFreeAdamW(parameters(), **OPTIONS, warmup_steps=warmup)
    for number in range(10):
        step([ours, original], number)
    assert_close(ours, original)
    resumed = ScheduleFreeAdamW([torch.nn.Parameter(p.detach().clone()) for p in params_of(original)])
    resumed.load_state_dict(original.state_dict())
    for number in range(10, 14):
        step([ours, original, resumed], number)
    assert_close(resumed, original)
    for optimizer in (ours, original, resumed):
        optimizer.eval()
    assert_close(ours, original)
    assert_close(resumed, original)


def test_other_weights_of_the_authors_average_are_refused():
    original = theirs(parameters())
    saved = train(original, 2).state_dict()
    saved["param_groups"][0]["r"] = 1.0
    with pytest.raises(ValueError, match=r"r=1\.0 and weight_lr_power=2"):
        ScheduleFreeAdamW(parameters()).load_state_dict(saved)


def test_the_authors_radam_is_refused():
    schedulefree = pytest.importorskip("schedulefree")
    original = schedulefree.RAdamScheduleFree(parameters())
    original.train()
    saved = train(original, 2).state_dict()
    with pytest.raises(ValueError, match="silent_sgd_phase"):
        ScheduleFreeAdamW(parameters()).load_state_dict(saved)


def test_the_authors_variant_with_closures_has_averages_between_steps():
    schedulefree = pytest.importorskip("schedulefree")

    def gradients(p, number):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        return 0.0

    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    original = schedulefree.AdamWScheduleFreeClosure([theirs], **OPTIONS)
    for number in range(3):
        original.step(lambda number=number: gradients(theirs, number))
    with torch.no_grad():
        ours.copy_(theirs)
    resumed = ScheduleFreeAdamW([ours])
    resumed.load_state_dict(original.state_dict())
    resumed.train()
    original.step(lambda: gradients(theirs, 3))
    resumed.step(lambda: gradients(ours, 3))
    resumed.eval()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [None, "file", {"param_groups": [{"k": 1, "params": [0]}]}])
def test_what_is_no_state_dict_is_refused_as_by_all(given):
    with pytest.raises((TypeError, ValueError), match=r"state_dict (is|has) .*optimizer\.state_dict\(\)"):
        ScheduleFreeAdamW(parameters()).load_state_dict(given)


MIXES = [(F32, None), (BF16, None), (BF16, "16bit"), (BF16, "8bit"), (BF16, "exact")]


def bits(optimizer):
    return [p.detach().clone() for p in params_of(optimizer)]


def made(dtype=F32, storage=None):
    return ScheduleFreeAdamW(parameters(dtype), **OPTIONS, storage=storage)


@pytest.mark.parametrize(("dtype", "storage"), MIXES)
def test_eval_and_train_leave_the_same_bits(dtype, storage):
    evaluated, plain = train(made(dtype, storage), 4), train(made(dtype, storage), 4)
    before = bits(evaluated)
    for _ in range(2):
        evaluated.eval()
        evaluated.eval()
        assert not all(map(torch.equal, bits(evaluated), before))
        evaluated.train()
        evaluated.train()
    assert all(map(torch.equal, bits(evaluated), before))
    assert all(map(torch.equal, bits(train(evaluated, 3, start=4)), bits(train(plain, 3, start=4))))


@pytest.mark.parametrize(("dtype", "storage"), MIXES)
def test_what_was_saved_in_eval_mode_goes_on(dtype, storage):
    optimizer = train(made(dtype, storage), 6)
    trained = bits(optimizer)
    optimizer.eval()
    saved = copy.deepcopy(optimizer.state_dict())
    other = ScheduleFreeAdamW([torch.nn.Parameter(p) for p in bits(optimizer)], storage=storage)
    other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"in eval mode.*optimizer\.train\(\)"):
        other.step()
    other.train()
    tolerance = 1e-5 if dtype == F32 else 2e-2
    for p, expected in zip(bits(other), trained, strict=True):
        torch.testing.assert_close(p, expected, rtol=tolerance, atol=tolerance)
    train(other, 2, start=6)


@pytest.mark.parametrize("how", ["in place", "through data", "replaced"])
def test_weights_that_were_written_in_eval_mode_are_taken(how):
    optimizer = train(made(), 3)
    optimizer.eval()
    (param, *_) = params_of(optimizer)
    z = optimizer.state[param]["z"]
    if how == "replaced":
        param.data = z.clone()
    else:
        with torch.no_grad():
            (param if how == "in place" else param.data).copy_(z)
    optimizer.train()
    torch.testing.assert_close(param.detach(), z)


def test_another_beta1_in_eval_mode_leaves_the_averages():
    optimizer = train(made(), 5)
    optimizer.eval()
    averages = bits(optimizer)
    for group in optimizer.param_groups:
        group["betas"] = (0.5, 0.95)
    optimizer.train()
    optimizer.eval()
    for p, expected in zip(bits(optimizer), averages, strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", ["exact", "8bit"])
def test_weights_that_become_wider_in_eval_mode(storage):
    optimizer = train(made(BF16, storage), 4)
    trained = bits(optimizer)
    optimizer.eval()
    wider = copy.deepcopy(optimizer)  # which does not have the bits from before
    for p in params_of(wider):
        p.data = p.data.float()
    wider.train()
    for p, expected in zip(bits(wider), trained, strict=True):
        torch.testing.assert_close(p, expected.float(), rtol=2e-2, atol=2e-2)
    before = bits(wider)
    wider.eval()
    wider.train()
    assert all(map(torch.equal, bits(wider), before))
    train(wider, 1, start=4)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_switch_that_fails_changes_nothing(is_trained):
    optimizer = train(made(), 4)
    if not is_trained:
        optimizer.eval()
        optimizer = copy.deepcopy(optimizer)  # which does not have the bits from before
    before, last = bits(optimizer), params_of(optimizer)[-1]
    z, optimizer.state[last]["z"] = optimizer.state[last]["z"], torch.zeros(17, 19)
    with pytest.raises(RuntimeError):
        (optimizer.eval if is_trained else optimizer.train)()
    assert all(map(torch.equal, bits(optimizer), before))
    assert all(group["train_mode"] == is_trained for group in optimizer.param_groups)
    optimizer.state[last]["z"] = z
    optimizer.eval()
    optimizer.train()


def test_a_closure_that_evaluates_and_does_not_go_back_is_refused():
    optimizer = train(made(), 2)
    steps = [float(optimizer.state[p]["step"]) for p in params_of(optimizer)]
    with pytest.raises(RuntimeError, match="in eval mode"):
        optimizer.step(lambda: optimizer.eval() or 0.0)
    optimizer.train()
    assert steps == [float(optimizer.state[p]["step"]) for p in params_of(optimizer)]


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        param = torch.ones(4)
        optimizer = ScheduleFreeAdamW([param], lr=0.1)
        param.grad = torch.ones(4)
        optimizer.step()
        before = param.clone()
        optimizer.eval()
        optimizer.train()
        assert torch.equal(param, before)


def test_steps_and_exports_are_refused_in_eval_mode():
    model = torch.nn.Linear(3, 2)
    optimizer = ScheduleFreeAdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.eval()
    for refused in (optimizer.step, lambda: optimizer.float32_state_dict(model)):
        with pytest.raises(RuntimeError, match="in eval mode"):
            refused()
    clone = copy.deepcopy(optimizer)
    clone.train()
    optimizer.train()
    optimizer.step()


def test_before_the_first_step_nothing_moves():
    optimizer = fusedadam.ScheduleFreeAdamW(parameters())
    before = bits(optimizer)
    optimizer.eval()
    optimizer.train()
    assert all(map(torch.equal, bits(optimizer), before))


def test_a_first_beta_of_0_is_refused():
    with pytest.raises(ValueError, match="begins with 0"):
        ScheduleFreeAdamW(parameters(), betas=(0.0, 0.999))


@pytest.mark.parametrize("steps", [2.5, -1, math.inf, math.nan])
def test_a_warmup_has_a_whole_number_of_steps(steps):
    with pytest.raises(ValueError, match=r"warmup_steps=.* is out of range; it must be a whole number, at least 0"):
        fusedadam.ScheduleFreeAdamW([torch.nn.Parameter(torch.ones(2))], warmup_steps=steps)
