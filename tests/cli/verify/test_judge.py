"""The judge knows right from wrong."""

from __future__ import annotations

import pytest
import torch

from fusedadam.cli.verify.cases import BF16, F16, F32, F64, OPTIMIZERS
from fusedadam.cli.verify.judge import Member, judge, ulp


def one(before, after, **changed):
    flags = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": False}
    options = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0}
    member = Member(before, {**flags, **changed.pop("flags", {})}, {**options, **changed}, 0)
    (verdicts,) = judge(OPTIMIZERS["AdamW"].rule, [member], [after], step=1)
    return {v.role: v for v in verdicts}


def tensors(dtype=F32, **values):
    return {name: torch.tensor([value], dtype=dtype) for name, value in values.items()}


def test_the_judge_knows_the_first_step_of_adam():
    """m = g / 2 and v = g^2 / 4, both corrected for their zeros: the step is lr, up to the sign of g."""
    before = tensors(param=2.0, grad=-4.0, exp_avg=0.0, exp_avg_sq=0.0)
    found = one(before, tensors(param=2.5, exp_avg=-2.0, exp_avg_sq=4.0))
    assert [(v.ulps, v.expected) for v in found.values()] == [(0.0, 2.5), (0.0, -2.0), (0.0, 4.0)]


@pytest.mark.parametrize(("off", "right"), [(1, True), (2, True), (3, False), (1000, False), (float("nan"), False)])
def test_two_ulps_are_allowed_and_no_more(off, right):
    before = tensors(param=2.0, grad=-4.0, exp_avg=0.0, exp_avg_sq=0.0)
    stored = torch.tensor([2.5 + off * 2**-22], dtype=F32)
    found = one(before, {**tensors(exp_avg=-2.0, exp_avg_sq=4.0), "param": stored})
    assert (found["param"].of_allowed <= 1) is right
    assert found["param"].ulps == (off if off == off else float("inf"))


def test_half_an_ulp_is_allowed_where_sixteen_bits_are_stored():
    before = tensors(BF16, param=2.0, grad=-4.0, exp_avg=0.0, exp_avg_sq=0.0)
    for param, right in ((2.5, True), (2.5 + 2**-6, False)):
        found = one(before, tensors(BF16, param=param, exp_avg=-2.0, exp_avg_sq=4.0))
        assert (found["param"].of_allowed <= 1) is right


def test_the_judge_clips_by_the_norm_of_all():
    options = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0, "max_grad_norm": 2.5}
    flags = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": True}
    zero = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    members = [Member(tensors(param=1.0, grad=g, **zero), flags, options, k) for k, g in enumerate((3.0, 4.0))]
    after = [tensors(param=0.5, exp_avg=g / 4, exp_avg_sq=g * g / 16) for g in (3.0, 4.0)]
    for own in judge(OPTIMIZERS["AdamW"].rule, members, after, step=1):
        for verdict in own:  # within the 1e-6 that is added to the norm
            assert verdict.got == pytest.approx(verdict.expected, rel=1e-6)
            assert verdict.role == "param" or verdict.got != verdict.expected


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_an_ulp_is_the_distance_to_the_next_number(dtype):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.tensor([1.0, 1.5, 3.0, 0.1, 1000.0], dtype=dtype)
    following = (values.view(kind) + 1).view(dtype)
    assert torch.equal(ulp(values, dtype), following.double() - values.double())
    assert torch.equal(ulp(-values, dtype), ulp(values, dtype))
