"""Errors of torch_npu's and MindSpeed's optimizers: they name the class's own arguments, and nothing has changed."""

from __future__ import annotations

import math
import re

import pytest
import torch

from fusedadam import ascend
from fusedadam.ascend import FusedEmaAdamW, NpuFusedAdamP, NpuFusedAdamW, NpuFusedBertAdam, mindspeed
from tests import test_checks as engine
from tests.test_checks import KINDS, VALUES, everything, leaf, refused

CLASSES = (NpuFusedAdamW, NpuFusedAdamP, NpuFusedBertAdam, FusedEmaAdamW)
NPU_ADAMW, NPU_ADAMP, NPU_BERT, EMA_ADAMW = ((cls,) for cls in CLASSES)
WITH_BETAS = NPU_ADAMW + NPU_ADAMP + EMA_ADAMW
NEIGHBOURS = (
    ascend.NpuFusedAdam, ascend.NpuFusedAdadelta, ascend.NpuFusedLamb, ascend.NpuFusedRMSprop, ascend.NpuFusedRMSpropTF,
    mindspeed.AdamW, ascend.FusedTorchAdamW,
)  # fmt: skip
RMSPROPS = (ascend.NpuFusedRMSprop, ascend.NpuFusedRMSpropTF)
BELOW_ZERO = [(-0.1, ValueError), (math.nan, ValueError), ("0.9", TypeError)]
NOT_BOOL = [(None, TypeError), ("yes", TypeError), (0.5, TypeError), (1, TypeError)]
NOT_A_BETA = [(1.0, ValueError), (1.5, ValueError), (-0.1, ValueError), (math.nan, ValueError), ("0.9", TypeError)]
NOT_A_BETA += [(None, TypeError), (True, TypeError)]
UNSUPPORTED = [*NOT_BOOL, (True, RuntimeError)]
REFUSED = (
    [(NEIGHBOURS, name, case) for name in ("lr", "eps", "weight_decay") for case in BELOW_ZERO]
    + [(RMSPROPS, name, case) for name in ("alpha", "momentum") for case in BELOW_ZERO]
    + [(RMSPROPS, "centered", case) for case in NOT_BOOL]
    + [(RMSPROPS[1:], name, case) for name in ("decoupled_decay", "lr_in_momentum") for case in NOT_BOOL]
    + [((ascend.NpuFusedAdadelta,), "rho", case) for case in [*BELOW_ZERO, (1.001, ValueError)]]
    + [((ascend.NpuFusedAdam, ascend.NpuFusedLamb), "betas", ((0.9, 1.0), ValueError))]
    + [((ascend.NpuFusedLamb,), name, case) for name in ("adam", "use_global_grad_norm") for case in NOT_BOOL]
)
REFUSED += (
    [(CLASSES, name, case) for name in ("lr", "weight_decay") for case in KINDS + VALUES]
    + [(WITH_BETAS, "eps", case) for case in KINDS + VALUES]
    + [(WITH_BETAS, "betas", case) for case in engine.PAIRS]
    + [(NPU_ADAMW, "amsgrad", case) for case in NOT_BOOL]
    + [(NPU_ADAMP, name, case) for name in ("delta", "wd_ratio") for case in KINDS + VALUES]
    + [(NPU_ADAMP, "nesterov", case) for case in NOT_BOOL]
    + [(NPU_BERT, name, case) for name in ("b1", "b2") for case in NOT_A_BETA]
    + [(NPU_BERT, "e", case) for case in KINDS + VALUES]
    + [(NPU_BERT, "warmup", (v, ValueError)) for v in (-0.5, -2, 1.0, 1.5, math.nan)]
    + [(NPU_BERT, "warmup", case) for case in KINDS]
    + [(NPU_BERT, "t_total", (v, ValueError)) for v in (0, -2, 0.5, math.nan, math.inf)]
    + [(NPU_BERT, "t_total", case) for case in KINDS]
    + [(NPU_BERT, "schedule", (v, ValueError)) for v in ("linear", "", None, "WARMUP_LINEAR")]
    + [(NPU_BERT, "max_grad_norm", (v, ValueError)) for v in (-0.5, -2, math.nan)]
    + [(EMA_ADAMW, "ema_decay", case) for case in [*KINDS, *VALUES, (1.001, ValueError)]]
    + [(EMA_ADAMW, name, case) for name in ("amsgrad", "maximize") for case in UNSUPPORTED]
    + [
        (EMA_ADAMW, name, case)
        for name in ("use_num_updates", "bias_correction", "adam_w_mode", "set_grad_none")
        for case in NOT_BOOL
    ]
)
OPTIONS = [
    pytest.param(cls, name, value, error, id=f"{cls.__name__}-{name}={value!r}")
    for classes, name, (value, error) in REFUSED
    for cls in classes
]
pytestmark = pytest.mark.filterwarnings("ignore:NpuFusedBertAdam. b2 is not given")


@pytest.mark.parametrize(("cls", "name", "value", "error"), OPTIONS)
def test_a_bad_option_through_every_door(cls, name, value, error):
    engine.test_a_bad_option_is_refused_through_every_door_and_leaves_no_trace(cls, name, value, error)
    with pytest.raises(error, match=rf"^{name}\b"):  # any message has an "e" somewhere
        cls([leaf(2)], **{name: value})


SGD = [
    ("lr", {"lr": -0.1}), ("momentum", {"momentum": -0.1}), ("weight_decay", {"weight_decay": -0.1}),
    ("nesterov", {"nesterov": True}), ("nesterov", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
    ("dampening", {"dampening": math.nan}), ("lr", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), SGD, ids=str)
def test_sgd_is_refused_as_torch_npu_does(name, options):
    lr = {"lr": 0.1} if name != "lr" else {}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        ascend.NpuFusedSGD([leaf(2)], **lr | options)


def test_sgd_may_have_a_learning_rate_in_each_group_alone():
    first, second = leaf(2), leaf(3)
    optimizer = ascend.NpuFusedSGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}])
    for p in (first, second):
        p.grad = torch.ones_like(p)
    expected = [first.detach() - 0.5, second.detach() - 0.25]
    optimizer.step()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


@pytest.mark.parametrize("cls", [mindspeed.AdamW, ascend.FusedTorchAdamW])
def test_mindspeeds_mode_must_be_a_bool(cls):
    with pytest.raises(TypeError, match=r"^adam_w_mode\b"):
        cls([leaf(2)], adam_w_mode=1)


NORMS = [("max_norm", -1.0, ValueError), ("max_norm", math.nan, ValueError), ("max_norm", "1", TypeError)]
NORMS += [("max_norm", None, TypeError), ("norm_type", 0, ValueError), ("norm_type", -2, ValueError)]
NORMS += [pytest.param("norm_type", v, (TypeError, ValueError)) for v in ("two", None)]


@pytest.mark.parametrize("cls", CLASSES[:3])
@pytest.mark.parametrize(("name", "value", "error"), NORMS)
def test_clipping_to_a_norm_that_is_none(cls, name, value, error):
    param = leaf(3)
    optimizer = cls([param])
    param.grad = torch.full((3,), 5.0)
    before = everything(optimizer)
    attempt = lambda: optimizer.clip_grad_norm_fused_(**{"max_norm": 1.0, name: value})  # noqa: E731
    refused(error, name, attempt, value)
    assert everything(optimizer) == before


def averaged(*shapes):
    params = [leaf(*shape) for shape in shapes]
    optimizer = FusedEmaAdamW(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_restoring_what_was_never_stored():
    optimizer = averaged((3,), (2, 2))
    before = everything(optimizer)
    for _ in range(2):
        refused(RuntimeError, "store", lambda: optimizer.restore(optimizer.param_groups))
        assert everything(optimizer) == before
    optimizer.store(optimizer.param_groups)
    optimizer.restore(optimizer.param_groups)
    refused(RuntimeError, "store", lambda: optimizer.restore(optimizer.param_groups))


OTHER_GROUPS = {
    "none": lambda groups: [],
    "one more": lambda groups: [*groups, {"params": [leaf(1)]}],
    "a parameter less": lambda groups: [{"params": groups[0]["params"][:1]}],
    "another shape": lambda groups: [{"params": [groups[0]["params"][0], leaf(5)]}],
    "another order": lambda groups: [{"params": groups[0]["params"][::-1]}],
    "others of the same shapes": lambda groups: [{"params": [leaf(3), leaf(2, 2)]}],
}


@pytest.mark.parametrize("kind", OTHER_GROUPS)
def test_restoring_into_other_groups(kind):
    """And then the same groups still get what was stored."""
    optimizer = averaged((3,), (2, 2))
    groups = optimizer.param_groups
    stored = [p.detach().clone() for p in groups[0]["params"]]
    optimizer.store(groups)
    optimizer.copy_to()
    before = everything(optimizer)
    refused(ValueError, "param_groups", lambda: optimizer.restore(OTHER_GROUPS[kind](groups)))
    assert everything(optimizer) == before
    optimizer.restore(groups)
    assert all(torch.equal(p, old) for p, old in zip(groups[0]["params"], stored, strict=True))


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"momentum": -0.1}, {"weight_decay": -0.1}, {"adjust_lr_fn": "other"}, {"ns_steps": 100}]
)
def test_distributed_muon_refuses_options(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}="):
        ascend._DistributedMuon([torch.nn.Parameter(torch.ones(3, 4))], **options)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), ()])
def test_distributed_muon_takes_matrices_alone(shape):
    optimizer = ascend._DistributedMuon([torch.nn.Parameter(torch.ones(3, 4))])
    message = re.escape(f"shape {shape}")
    for make in (ascend._DistributedMuon, lambda params: optimizer.add_param_group({"params": params})):
        with pytest.raises(ValueError, match=message):
            make([torch.nn.Parameter(torch.ones(shape))])
    with pytest.raises(TypeError, match="process_group is a int; it must be a"):
        ascend._DistributedMuon([torch.nn.Parameter(torch.ones(3, 4))], process_group=1)


def test_distributed_muon_takes_matrices_alone_when_their_shape_is_known():
    conv = torch.nn.LazyConv2d(2, 3)
    optimizer = ascend._DistributedMuon([conv.weight])
    conv(torch.ones(1, 4, 8, 8)).sum().backward()
    with pytest.raises(ValueError, match=re.escape("shape (2, 4, 3, 3), and _DistributedMuon takes matrices alone")):
        optimizer.step()


def test_distributed_muon_has_no_groups_for_adamw():
    optimizer = ascend._DistributedMuon([torch.nn.Parameter(torch.ones(3, 4))], lr=0.1)
    for value in (False, None):
        with pytest.raises(ValueError, match=f"use_muon={value}: _DistributedMuon has no AdamW"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 4))], "use_muon": value})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, 4))], "use_muon": True})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]  # torch_npu's, not Keller Jordan's
