"""torch_npu's and MindSpeed's optimizers: their arguments and methods, with the results of our optimizers."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings

import pytest
import torch
from torch.optim.optimizer import required

import fusedadam
from fusedadam import ascend
from fusedadam.ascend import mindspeed, optimizers
from tests.ascend.training import assert_same, leaves, params_of, set_grads, tensors, train
from tests.support import BF16, F16, F32, F64

NpuFusedAdamW, NpuFusedAdamP, NpuFusedBertAdam = ascend.NpuFusedAdamW, ascend.NpuFusedAdamP, ascend.NpuFusedBertAdam
FusedEmaAdamW = ascend.FusedEmaAdamW
EVERY_NPU = pytest.mark.parametrize(
    "cls",
    [
        NpuFusedAdamW, NpuFusedAdamP, NpuFusedBertAdam, ascend.NpuFusedAdam, ascend.NpuFusedAdadelta,
        ascend.NpuFusedLamb, ascend.NpuFusedRMSprop, ascend.NpuFusedRMSpropTF,
        functools.partial(ascend.NpuFusedSGD, lr=0.1),
    ],
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:NpuFusedBertAdam. b2 is not given")


# arguments

SIGNATURES = {
    "NpuFusedAdamW": "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False",
    "NpuFusedAdam": "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False",
    "NpuFusedSGD": "params, lr=required, momentum=0., dampening=0., weight_decay=0., nesterov=False",
    "NpuFusedAdadelta": "params, lr=1.0, rho=0.9, eps=1e-6, weight_decay=0",
    "NpuFusedRMSprop": "params, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0, momentum=0, centered=False",
    "NpuFusedRMSpropTF": "params, lr=1e-2, alpha=0.9, eps=1e-10, weight_decay=0, momentum=0., centered=False, "
    "decoupled_decay=False, lr_in_momentum=True",
    "NpuFusedLamb": "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0, adam=False, "
    "use_global_grad_norm=False",
    "NpuFusedOptimizerBase": "params, default",
    "_DistributedMuon": "params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, "
    "ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7, ns_steps=5, adjust_lr_fn=None, process_group=None",
    "FusedTorchAdamW": "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, "
    "adam_w_mode=False, *, maximize=False, foreach=None, capturable=False, differentiable=False, fused=None",
    "NpuFusedAdamP": "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, delta=0.1, wd_ratio=0.1, "
    "nesterov=False",
    "NpuFusedBertAdam": "params, lr=1e-3, warmup=-1, t_total=-1, schedule='warmup_linear', b1=0.9, b2=0.99, e=1e-6, "
    "weight_decay=0.01, max_grad_norm=1.0",
    "FusedEmaAdamW": "params, lr=1e-3, eps=1e-8, betas=(0.9, 0.999), weight_decay=1e-2, ema_decay=0.9999, "
    "amsgrad=False, *, maximize=False, use_num_updates=True, bias_correction=True, adam_w_mode=True, "
    "set_grad_none=True",
    "npu_apply_fused_adamw_v2": "var, grad, m, v, max_grad_norm, step, lr=1e-3, beta1=0.9, beta2=0.999, "
    "weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False",
    "npu_apply_fused_ema_adamw": "grad, var, m, v, s, step, lr=1e-3, ema_decay=0.9999, beta1=0.9, beta2=0.999, "
    "eps=1e-8, mode=1, bias_correction=True, weight_decay=0.0",
    "aclnnApplyFusedEmaAdamGetWorkspaceSize": "grad, varRef, mRef, vRef, sRef, step, lr, emaDecay, beta1, beta2, eps, "
    "mode, biasCorrection, weightDecay",
    "aclnnApplyFusedEmaAdam": "workspace, workspaceSize, executor, stream",
    "aclnnApplyAdamWV2GetWorkspaceSize": "varRef, mRef, vRef, maxGradNormOptionalRef, grad, step, lr, beta1, beta2, "
    "weightDecay, eps, amsgrad, maximize",
    "aclnnApplyAdamWV2": "workspace, workspaceSize, executor, stream",
    "fused_ema_adamw": "grad, var, m, v, s, step, lr, ema_decay, beta1, beta2, eps, mode, bias_correction, "
    "weight_decay",
    "npu_apply_adam_w": "beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm=None, "
    "amsgrad=None, maximize=None, *, out",
    "npu_apply_adam": "beta1_power, beta2_power, lr, beta1, beta2, epsilon, grad, use_locking=None, "
    "use_nesterov=None, *, out",
    "npu_bert_apply_adam": "lr, beta1, beta2, epsilon, grad, max_grad_norm, global_grad_norm, weight_decay, "
    "step_size=None, adam_mode=0, *, out",
}


def without_types(function):
    signature = inspect.signature(function)
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_are_those_of_the_page_in_its_order_with_its_defaults(name):
    assert without_types(getattr(ascend, name)) == without_types(
        eval(f"lambda {SIGNATURES[name]}: 0", {"required": required})
    )


def test_methods_have_their_defaults():
    assert without_types(NpuFusedAdamW.zero_grad)[1:] == without_types(lambda set_to_none=False: 0)
    assert without_types(NpuFusedAdamW.clip_grad_norm_fused_)[1:] == without_types(lambda max_norm, norm_type=2: 0)


# results


def seeds_params():
    """As in the pages' examples: two dtypes in turn, and the last parameter has no gradient."""
    shapes = [(F32, 2), (F32, 4), (F16, 2), (F16, 4), (F32, 5), (F16, 6), (F32, 2)]
    params = [torch.arange(3 * n).reshape(n, 3).to(dtype) for dtype, n in shapes]
    for p in params[:-1]:
        p.requires_grad = True
        p.grad = p.clone().detach() / 100.0
    return params


EMA = {"lr": 0.05, "weight_decay": 0.3, "ema_decay": 0.5}
FLAGS = list(itertools.product((False, True), repeat=3))


def theirs(warmup, bias_correction, decoupled):
    return {**EMA, "use_num_updates": warmup, "bias_correction": bias_correction, "adam_w_mode": decoupled}


def ours(warmup, bias_correction, decoupled):
    return {**EMA, "ema_warmup": warmup, "bias_correction": bias_correction, "decoupled": decoupled}


ADAMW = {"amsgrad": True, "lr": 0.1, "betas": (0.5, 0.9)}
ADAMP = {"nesterov": True, "delta": 10.0, "wd_ratio": 0.5, "weight_decay": 0.1}
BERT = {"b2": 0.999, "warmup": 0.5, "t_total": 5, "schedule": "warmup_poly"}
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1}
NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True}
DECAYED = {"rho": 0.8, "weight_decay": 0.1}
CENTERED = {"lr": 0.05, "momentum": 0.9, "centered": True, "weight_decay": 0.1}
TENSORFLOWS = {**CENTERED, "decoupled_decay": True, "lr_in_momentum": False}
LAMB = {"lr": 0.05, "weight_decay": 0.1, "use_global_grad_norm": True}
NPUS_LAMB = {"bias_correction": False, "max_weight_norm": 10}
PAIRS = [
    (ascend.NpuFusedAdam, {}, fusedadam.Adam, {}),
    (ascend.NpuFusedAdam, ADAMW, fusedadam.Adam, ADAMW),
    (ascend.NpuFusedSGD, {"lr": 0.1}, fusedadam.SGD, {"lr": 0.1}),
    (ascend.NpuFusedSGD, SGD, fusedadam.SGD, SGD),
    (ascend.NpuFusedSGD, NESTEROV, fusedadam.SGD, NESTEROV),
    (ascend.NpuFusedAdadelta, {}, fusedadam.Adadelta, {}),
    (ascend.NpuFusedAdadelta, DECAYED, fusedadam.Adadelta, DECAYED),
    (ascend.NpuFusedRMSprop, {}, fusedadam.RMSprop, {}),
    (ascend.NpuFusedRMSprop, CENTERED, fusedadam.RMSprop, CENTERED),
    (ascend.NpuFusedRMSpropTF, {}, fusedadam.RMSpropTF, {}),
    (ascend.NpuFusedRMSpropTF, TENSORFLOWS, fusedadam.RMSpropTF, TENSORFLOWS),
    (ascend.NpuFusedLamb, {}, fusedadam.Lamb, {**NPUS_LAMB, "weight_decay": 0}),
    (ascend.NpuFusedLamb, LAMB, fusedadam.Lamb, {**LAMB, **NPUS_LAMB}),
    (ascend.NpuFusedLamb, {"adam": True}, fusedadam.Lamb, {**NPUS_LAMB, "weight_decay": 0, "adam": True}),
    (mindspeed.AdamW, {**ADAMW, "maximize": True}, fusedadam.AdamW, {**ADAMW, "maximize": True}),
    (ascend.FusedTorchAdamW, {**ADAMW, "fused": True}, fusedadam.AdamW, ADAMW),
    (NpuFusedAdamW, {}, fusedadam.AdamW, {}),
    (NpuFusedAdamW, ADAMW, fusedadam.AdamW, ADAMW),
    (NpuFusedAdamP, {}, fusedadam.AdamP, {}),
    (NpuFusedAdamP, ADAMP, fusedadam.AdamP, ADAMP),
    (NpuFusedBertAdam, {}, fusedadam.BertAdam, {"b2": 0.99}),
    (NpuFusedBertAdam, BERT, fusedadam.BertAdam, BERT),
    *((FusedEmaAdamW, theirs(*flags), fusedadam.EmaAdamW, ours(*flags)) for flags in FLAGS),
]


@pytest.mark.parametrize(("cls", "options", "our_cls", "our_options"), PAIRS)
def test_it_is_ours_to_the_bit(cls, options, our_cls, our_options):
    """With a gradient missing now and then. tests/meaning has the formulas of ours."""
    both = [make(seeds_params(), **own) for make, own in ((cls, options), (our_cls, our_options))]
    for optimizer in both:
        train(optimizer, missing=lambda step: {6, 1 + step % 3})
    assert_same(*both)


def test_each_flag_of_the_averaging_optimizer_matters():
    """Otherwise the test above would compare nothing."""
    trained = [train(FusedEmaAdamW(leaves(), **theirs(*flags))) for flags in FLAGS]
    averages = [optimizer.state[params_of(optimizer)[0]]["ema_params"] for optimizer in trained]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(averages, 2))


def test_a_group_may_be_clipped_by_one_norm():
    """As torch_npu's released code does; ``clip`` is no argument there, but a key that any group may have."""
    options = {"lr": 0.1, "max_grad_norm": 0.5, "b2": 0.99}
    npu = train(NpuFusedBertAdam([{"params": leaves(), "clip": "group"}], **options))
    assert_same(npu, train(fusedadam.BertAdam(leaves(), clip="group", **options)))
    each = train(NpuFusedBertAdam(leaves(), **options))
    assert not torch.equal(params_of(npu)[0], params_of(each)[0])


# the averaging optimizer's weights


def test_the_average_can_be_looked_at_and_the_trained_weights_come_back():
    optimizer = train(FusedEmaAdamW([{"params": leaves()[:2]}, {"params": leaves()[2:]}], lr=0.1), 3)
    fresh = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [fresh]})  # has no average yet
    trained = copy.deepcopy(tensors(optimizer))
    optimizer.store(optimizer.param_groups)
    optimizer.copy_to()
    for p in params_of(optimizer)[:-1]:
        assert torch.equal(p, optimizer.state[p]["ema_params"])
        assert p.requires_grad
    assert torch.equal(fresh, torch.ones(2))
    assert fresh not in optimizer.state
    assert not torch.equal(params_of(optimizer)[0], trained[0][0])
    optimizer.restore(optimizer.param_groups)
    torch.testing.assert_close(tensors(optimizer), trained, rtol=0, atol=0)


def test_looking_at_the_average_leaves_no_trace_in_the_training():
    both = [train(FusedEmaAdamW(leaves(), lr=0.1), 3) for _ in range(2)]
    both[0].store(both[0].param_groups)
    both[0].copy_to()
    both[0].restore(both[0].param_groups)
    assert_same(*(train(optimizer, 2, start=3) for optimizer in both))


def test_what_is_stored_is_a_copy_and_the_last_one_counts():
    optimizer = train(FusedEmaAdamW(leaves((F32, BF16)), lr=0.1), 1)
    optimizer.store(optimizer.param_groups)
    train(optimizer, 1, start=1)
    second = copy.deepcopy(tensors(optimizer)[0])
    optimizer.store(optimizer.param_groups)
    train(optimizer, 1, start=2)
    optimizer.restore(optimizer.param_groups)
    torch.testing.assert_close(tensors(optimizer)[0], second, rtol=0, atol=0)


# what torch_npu's optimizers have beyond torch's


@EVERY_NPU
def test_gradients_become_zeros_unless_told_otherwise(cls):
    optimizer = train(cls(leaves()), 1)
    grads = [p.grad for p in params_of(optimizer)]
    optimizer.zero_grad()
    assert all(p.grad is grad and not grad.any() for p, grad in zip(params_of(optimizer), grads, strict=True))
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params_of(optimizer))


@pytest.mark.parametrize("to_none", [True, False])
def test_the_averaging_optimizer_does_what_it_was_told_when_it_was_made(to_none):
    for argument, expected in ((None, to_none), (True, True), (False, False)):
        optimizer = train(FusedEmaAdamW(leaves(), set_grad_none=to_none), 1)
        optimizer.zero_grad(*() if argument is None else (argument,))
        assert all((p.grad is None) == expected for p in params_of(optimizer))
        assert expected or not any(p.grad.any() for p in params_of(optimizer))
    optimizer = train(FusedEmaAdamW(leaves()), 1)
    optimizer.zero_grad()
    assert params_of(optimizer)[0].grad is None


@EVERY_NPU
@pytest.mark.parametrize("norm_type", [2, float("inf"), 1])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_are_clipped_in_place_as_torch_does_it(cls, norm_type, max_norm):
    ours, theirs = leaves((F64,)), leaves((F64,))
    for params in (ours, theirs):
        set_grads(params, 0, missing={1})
    optimizer = cls([{"params": ours[:2]}, {"params": ours[2:]}])
    before = [p.grad for p in ours]
    norm = optimizer.clip_grad_norm_fused_(max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert isinstance(norm, torch.Tensor)
    assert norm.dim() == 0
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for p, q, grad in zip(ours, theirs, before, strict=True):
        assert p.grad is grad
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=0)


# the note about b2


@pytest.fixture
def warned():
    """The warnings of a process in which nothing has warned yet."""
    optimizers._warn_about_b2.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    optimizers._warn_about_b2.cache_clear()


def test_a_b2_that_is_not_given_is_noted_once(warned):
    for _ in range(3):
        NpuFusedBertAdam(leaves(), lr=0.1)
    (one,) = warned
    assert (one.category, one.filename) == (UserWarning, __file__), "the line that made the optimizer"
    assert all(word in str(one.message) for word in ("NpuFusedBertAdam", "b2", "0.999", "0.99,"))


def test_a_b2_that_is_given_is_not_noted_whatever_it_is(warned):
    for b2 in (0.99, 0.999, 0.5):
        NpuFusedBertAdam(leaves(), b2=b2)
    NpuFusedBertAdam(leaves(), 1e-3, -1, -1, "warmup_linear", 0.9, 0.99)
    NpuFusedBertAdam([{"params": leaves()[:1], "b2": 0.99}, {"params": leaves()[1:], "b2": 0.999}])
    for other in (NpuFusedAdamW, NpuFusedAdamP, FusedEmaAdamW):
        train(other(leaves()), 1)
    assert not warned


def test_a_group_without_its_own_b2_is_noted_also_if_it_comes_later(warned):
    optimizer = NpuFusedBertAdam([{"params": leaves()[:1], "b2": 0.99}])
    assert not warned
    optimizer.add_param_group({"params": leaves()[1:]})
    assert len(warned) == 1
    assert [group["b2"] for group in optimizer.param_groups] == [0.99, 0.99]
