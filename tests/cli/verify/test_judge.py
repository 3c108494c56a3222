"""The judge agrees with steps of every optimizer, and finds what is wrong with them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fusedadam.catalog import CATALOG
from fusedadam.cli.verify import steps
from fusedadam.cli.verify.bounded import ulp
from fusedadam.cli.verify.cases import cases_of
from fusedadam.cli.verify.judge import Member, calls, judge
from fusedadam.cli.verify.steps import Place
from fusedadam.ops import group_sum, largest, power, sqrt, tensor_norm, total
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule
from tests.support import BF16, F16, F32, F64

EAGER = Place("cpu", "eager")


def verdicts(optimizer, step, number):
    judged = judge(CATALOG[optimizer].cls.rule, step.members, step.values, number)
    return [verdict for own in judged for verdict in own]


@pytest.mark.parametrize("optimizer", CATALOG)
def test_it_accepts_every_optimizer_of_ours_and_not_much_more(optimizer):
    """In float32, and the last case that sums, in another dtype; a few ulps more are wrong."""
    cases = [case for case in cases_of(optimizer, everything=False) if case.is_judged and case.storage is None]
    summing = [case for case in cases if case.options.get("max_grad_norm")] or cases
    in_float32 = next(case for case in cases if (case.param, case.state) == (F32, F32))
    for case in (summing[-1], in_float32):
        taken = steps.take(case, EAGER, 0)
        for number, step in enumerate(taken, start=1):
            assert max(v.of_allowed for v in verdicts(optimizer, step, number)) <= 1, case.title
    right = [own["param"] for own in step.values]
    for own, param in zip(step.values, right, strict=True):
        own["param"] = param * (1 + 4e-7)
    assert is_found(optimizer, step, number)
    for own, param, member in zip(step.values, right, step.members, strict=True):
        own["param"] = param + 1e-4 * (param - member.before["param"])
    assert is_found(optimizer, step, number), "rounding the parameter must not hide an error of its update"


def is_found(optimizer, step, number):
    return any(v.of_allowed > 1 for v in verdicts(optimizer, step, number) if v.role == "param")


def tensors(dtype=F32, **values):
    return {name: torch.tensor([value], dtype=dtype) for name, value in values.items()}


def first_step_of_adam(param, dtype=F32):
    """m = g / 2 and v = g^2 / 4, both corrected for their zeros: the step is lr, up to the sign of g."""
    before = tensors(dtype, param=2.0, grad=-4.0, exp_avg=0.0, exp_avg_sq=0.0)
    options = {"lr": 0.5, "beta1": 0.5, "beta2": 0.75, "eps": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0}
    after = {**tensors(dtype, exp_avg=-2.0, exp_avg_sq=4.0), "param": torch.tensor([param], dtype=dtype)}
    (own,) = judge(CATALOG["AdamW"].cls.rule, [Member(before, {"decoupled": True}, options, 0)], [after], step=1)
    return own


def test_the_judge_knows_the_first_step_of_adam():
    assert [(v.ulps, v.expected) for v in first_step_of_adam(2.5)] == [(0.0, 2.5), (0.0, -2.0), (0.0, 4.0)]


@pytest.mark.parametrize(("off", "right"), [(1, True), (4, False), (1000, False), (float("nan"), False)])
def test_a_few_ulps_are_allowed_and_no_more(off, right):
    found = first_step_of_adam(2.5 + off * 2**-22)[0]
    assert (found.of_allowed <= 1) is right
    assert found.ulps == (off if off == off else float("inf"))


def test_half_an_ulp_is_allowed_where_sixteen_bits_are_stored():
    for param, right in ((2.5, True), (2.5 + 2**-6, False)):
        assert (first_step_of_adam(param, BF16)[0].of_allowed <= 1) is right


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_an_ulp_is_the_distance_to_the_next_number(dtype):
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    values = torch.tensor([1.0, 1.5, 3.0, 0.1, 1000.0], dtype=dtype)
    following = (values.view(kind) + 1).view(dtype)
    assert torch.equal(ulp(values, dtype), following.double() - values.double())
    assert torch.equal(ulp(-values, dtype), ulp(values, dtype))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_wrong_state_is_found_and_where_it_is(dtype):
    case = next(c for c in cases_of("AdamW", everything=False) if (c.param, c.storage) == (dtype, None))
    step, *_ = steps.take(case, EAGER, 0)
    step.values[7]["exp_avg_sq"][2, 3] *= 1 + 3 * torch.finfo(step.values[7]["exp_avg_sq"].dtype).eps
    wrong = [v for v in verdicts("AdamW", step, 1) if v.of_allowed > 1]
    assert [(v.role, v.index) for v in wrong] == [("exp_avg_sq", (2, 3))]


def test_states_that_are_stored_halfway_are_read_as_they_were_stored():
    """Lamb's step is made of moments in bfloat16, as they were rounded before its norms were taken."""
    case = next(c for c in cases_of("Lamb", everything=False) if (c.param, c.state) == (F32, BF16))
    step, *_ = steps.take(case, EAGER, 0)
    assert all(v.of_allowed <= 1 for v in verdicts("Lamb", step, 1))
    param = step.values[12]["param"]
    step.values[12]["param"] = param + (param - step.members[12].before["param"]) * 1e-4
    assert any(v.of_allowed > 1 for v in verdicts("Lamb", step, 1)), "bfloat16's own error would hide this"


def _scalars(lr):
    return {"lr": lr}


@rule(scalars=_scalars)
def shared(param: Value, grad: Value, *, lr: Scalar, matrix: Flag) -> Values:
    if matrix:
        grad = grad / sqrt(group_sum(grad * grad))
    top, size = largest(param * param), total(param * param)
    grad = grad / top + tensor_norm(param)
    param = param - lr * power(grad * grad, 0.25) / size
    return param


def member(value, group):
    param = torch.tensor(value)
    return Member({"param": param, "grad": 2 * param}, {}, {"lr": 0.5}, group)


def test_sums_over_groups_and_over_all_are_taken_over_all_of_them():
    """One after the other, though some parameters have no part in the first one."""
    members = [member([[3.0, 4.0]], 0), member([[1.0, 2.0]], 1), member([2.0], 0), member([[5.0]], 1)]
    grads = [m.before["grad"].double() for m in members]
    matrices = [0, 1, 3]
    for group in (0, 1):
        own = [k for k in matrices if members[k].group == group]
        norm = sum(grads[k].square().sum() for k in own).sqrt()
        for k in own:
            grads[k] = grads[k] / norm
    params = [m.before["param"].double() for m in members]
    top, size = max(p.square().max() for p in params), sum(p.square().sum() for p in params)
    grads = [g / top + p.square().sum().sqrt() for p, g in zip(params, grads, strict=True)]
    after = [{"param": (p - 0.5 * g.square() ** 0.25 / size).float()} for p, g in zip(params, grads, strict=True)]
    judged = [v for own in judge(shared, members, after, 1) for v in own]
    assert all(0 < v.of_allowed <= 1 or v.got == v.expected for v in judged)
    assert all(v.ulps < 1 for v in judged)
    assert calls(shared.update, power)
    assert calls(shared.update, sqrt)
    assert not calls(CATALOG["Lamb"].cls.rule.update, power)


def test_a_nan_or_an_overflow_that_the_rule_asks_for_is_right():
    members = [dataclasses.replace(member([0.0, 0.0], 0), options={"lr": 1.0})]
    (own,) = judge(shared, members, [{"param": torch.tensor([float("nan")] * 2)}], 1)
    assert own[0].of_allowed == 0
    (own,) = judge(shared, members, [{"param": torch.tensor([0.0, float("nan")])}], 1)
    assert own[0].of_allowed == float("inf")
    half = Member(
        {"param": torch.tensor([6e4], dtype=F16), "grad": torch.tensor([1.0], dtype=F16)}, {}, {"lr": -1e20}, 0
    )
    (own,) = judge(shared, [half], [{"param": torch.tensor([float("inf")], dtype=F16)}], 1)
    assert own[0].of_allowed == 0


def test_float64_is_judged_in_float64():
    members = [Member({"param": torch.ones(3, dtype=F64), "grad": torch.ones(3, dtype=F64)}, {}, {"lr": 0.5}, 0)]
    exact = judge(shared, members, [{"param": torch.zeros(3, dtype=F64)}], 1)[0][0].expected
    for off, right in ((0.0, True), (1e-12, False)):
        (own,) = judge(shared, members, [{"param": torch.full((3,), exact + off, dtype=F64)}], 1)
        assert (own[0].of_allowed <= 1) is right
