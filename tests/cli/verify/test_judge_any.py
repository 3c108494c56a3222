"""The judge of unknown rules agrees with steps of the rules that we know, and finds what is wrong with others."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fusedadam.cli.verify import judge_any, steps
from fusedadam.cli.verify.cases import BF16, F16, F32, F64, OPTIMIZERS, chosen
from fusedadam.cli.verify.judge import Member
from fusedadam.cli.verify.steps import Place
from fusedadam.ops import group_sum, largest, power, sqrt, tensor_norm, total
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule

EAGER = Place("cpu", "eager")


def verdicts(optimizer, step, number):
    judged = judge_any.judge(OPTIMIZERS[optimizer].rule, step.members, step.values, number)
    return [verdict for own in judged for verdict in own]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_accepts_every_optimizer_of_ours_and_not_much_more(optimizer):
    """In float32, and the last case that sums, in another dtype; a few ulps more are wrong."""
    cases = [case for case in chosen([optimizer], everything=False) if case.is_judged and case.storage is None]
    summing = [case for case in cases if case.options.get("max_grad_norm")] or cases
    in_float32 = next(case for case in cases if (case.param, case.state) == (F32, F32))
    for case in (summing[-1], in_float32):
        taken = steps.take(case, EAGER, 0)
        for number, step in enumerate(taken, start=1):
            assert max(v.of_allowed for v in verdicts(optimizer, step, number)) <= 1, case.title
    for own in step.values:
        own["param"] *= 1 + 4e-7
    assert max(v.of_allowed for v in verdicts(optimizer, step, number) if v.role == "param") > 1


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_wrong_state_is_found_and_where_it_is(dtype):
    case = next(c for c in chosen(["AdamW"], everything=False) if (c.param, c.storage) == (dtype, None))
    step, *_ = steps.take(case, EAGER, 0)
    step.values[7]["exp_avg_sq"][2, 3] *= 1 + 3 * torch.finfo(step.values[7]["exp_avg_sq"].dtype).eps
    wrong = [v for v in verdicts("AdamW", step, 1) if v.of_allowed > 1]
    assert [(v.role, v.index) for v in wrong] == [("exp_avg_sq", (2, 3))]


def test_states_that_are_stored_halfway_are_read_as_they_were_stored():
    """Lamb's step is made of moments in bfloat16, as they were rounded before its norms were taken."""
    case = next(c for c in chosen(["Lamb"], everything=False) if (c.param, c.state) == (F32, BF16))
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
    judged = [v for own in judge_any.judge(shared, members, after, 1) for v in own]
    assert all(0 < v.of_allowed <= 1 or v.got == v.expected for v in judged)
    assert all(v.ulps < 1 for v in judged)
    assert judge_any.calls(shared.update, power)
    assert judge_any.calls(shared.update, sqrt)
    assert not judge_any.calls(OPTIMIZERS["Lamb"].rule.update, power)


def test_a_nan_or_an_overflow_that_the_rule_asks_for_is_right():
    members = [dataclasses.replace(member([0.0, 0.0], 0), options={"lr": 1.0})]
    (own,) = judge_any.judge(shared, members, [{"param": torch.tensor([float("nan")] * 2)}], 1)
    assert own[0].of_allowed == 0
    (own,) = judge_any.judge(shared, members, [{"param": torch.tensor([0.0, float("nan")])}], 1)
    assert own[0].of_allowed == float("inf")
    half = Member(
        {"param": torch.tensor([6e4], dtype=F16), "grad": torch.tensor([1.0], dtype=F16)}, {}, {"lr": -1e20}, 0
    )
    (own,) = judge_any.judge(shared, [half], [{"param": torch.tensor([float("inf")], dtype=F16)}], 1)
    assert own[0].of_allowed == 0


def test_float64_is_judged_in_float64():
    members = [Member({"param": torch.ones(3, dtype=F64), "grad": torch.ones(3, dtype=F64)}, {}, {"lr": 0.5}, 0)]
    exact = judge_any.judge(shared, members, [{"param": torch.zeros(3, dtype=F64)}], 1)[0][0].expected
    for off, right in ((0.0, True), (1e-12, False)):
        (own,) = judge_any.judge(shared, members, [{"param": torch.full((3,), exact + off, dtype=F64)}], 1)
        assert (own[0].of_allowed <= 1) is right
