"""Scalars that a device computes have the bits of the host's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedadam import backends
from fusedadam.engine.device_scalars import DeviceScalars
from fusedadam.engine.launch_table import LaunchTable
from fusedadam.engine.member import Member
from fusedadam.engine.scalar_operations import ScalarOperations
from tests.rules.test_counts import NUMBERS
from tests.support import ADAM, ADAMP, BERT, CASES, EMA, F32, F64, SUMMING, draw

EVERY_CASE = [*CASES, *SUMMING]
STEPS = [1.0, 2.0, 11.0, 4096.0, 4097.0, 1e6, 2.0**24]
SHAPES = [(5, 4), (3, 2, 2), (6, 1)]


@pytest.fixture(autouse=True, params=["operations", "kernel"])
def computed_by(request, monkeypatch):
    """Scalars by torch operations, and by a kernel of Triton, which here is interpreted."""
    if request.param == "kernel" and torch.cuda.is_available():
        pytest.skip("with a GPU, Triton does not run on the CPU")
    monkeypatch.setitem(globals(), "BACKEND", {"operations": "eager", "kernel": "triton"}[request.param])
    if request.param == "kernel" and "adafactor" in request.node.name:
        pytest.skip("its scalars have a power, which only torch's operations compute")
    if request.param == "kernel":  # all other optimizers here have one
        monkeypatch.delattr(ScalarOperations, "update")
        monkeypatch.delattr(ScalarOperations, "count")
    return request.param


BACKEND = "eager"


def table_of(case, shapes=SHAPES):
    """A table for the CPU: of matrices alone, so that one serves them all."""
    roles = draw(case, shapes, [F32])
    specialized = case.rule.specialize(case.flags, roles[0]["param"])
    members = [Member(specialized, backends.choose(torch.device("cpu"), BACKEND), own) for own in roles]
    return LaunchTable(range(len(roles)), members), roles  # whose memory the table points to


def written(table):
    return table.numbers[: len(table.scalars)].copy()


def assert_scalars(table, ours, expected, rtol=0.0):
    """To the bit, but for the quotient of a number and a tensor: see the next test but one."""
    assert np.isfinite(expected).all()
    for name, own, theirs in zip(table.scalars, ours, expected, strict=True):
        slack = max(rtol, 2**-52) if name == "step_size" else rtol
        np.testing.assert_allclose(own, theirs, rtol=slack, atol=0, err_msg=name)


def as_options(case, **changes):
    values = {**case.options, **changes}
    return tuple(values[name] for name in case.rule.hyper_parameters)


def from_host(case, table, options, steps, groups):
    """The scalars that the host writes, parameter by parameter."""
    keys = [(options[group], step) for group, step in zip(groups, steps, strict=True)]
    scalars, order = case.rule.scalars_of(keys)
    table.numbers[: len(table.scalars)] = np.nan
    table.set_scalars(scalars, np.array(order, dtype=np.int64))
    return written(table)


def from_device(case, table, options, steps, groups, places=slice(None), flat=None, twice=True):
    flat = torch.tensor([s - 1 for s in steps], dtype=F32) if flat is None else flat
    device = DeviceScalars(case.rule, table, flat, places, np.array(groups, dtype=np.int64))
    table.numbers[: len(table.scalars)] = np.nan
    for _ in range(1 + twice):  # what stays the same is written once
        device.update(options)
    return written(table)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda c: c.id)
def test_a_device_writes_the_scalars_of_the_host(case):
    table, _alive = table_of(case)
    options, groups = [as_options(case)], [0] * len(SHAPES)
    for step in STEPS:
        steps = [step] * len(SHAPES)
        expected = from_host(case, table, options, steps, groups)
        assert_scalars(table, from_device(case, table, options, steps, groups), expected)


BY_RULE = {case.rule.name: case for case in EVERY_CASE if "max_grad_norm" in case.options}


@pytest.mark.parametrize("name", ["adam", "adamp"])
def test_the_step_size_of_a_device_has_the_bits_of_the_host(name):
    """``lr / (1 - beta1**step)`` is rounded twice on a device where lr is a number, once where it is a tensor."""
    case = BY_RULE[name]
    table, _alive = table_of(case)
    for step in range(1, 100):
        steps, groups, options = [float(step)] * 3, [0] * 3, [as_options(case)]
        expected = from_host(case, table, options, steps, groups)
        np.testing.assert_array_equal(from_device(case, table, options, steps, groups), expected)


@pytest.mark.parametrize("name", ["adam", "adamp"])
def test_the_step_size_of_a_device_has_the_bits_of_the_host_where_lr_is_a_tensor(name):
    case = BY_RULE[name]
    table, _alive = table_of(case)
    for step in range(1, 100):
        steps, groups, lr = [float(step)] * 3, [0] * 3, torch.tensor(0.01, dtype=F64)
        expected = from_host(case, table, [as_options(case)], steps, groups)
        there = from_device(case, table, [as_options(case, lr=lr)], steps, groups)
        np.testing.assert_array_equal(there, expected)


@pytest.mark.parametrize("name", BY_RULE)
def test_groups_and_counts_of_their_own(name):
    """Groups that differ in lr and weight decay are one calculation, in other options one each: the same bits."""
    case = BY_RULE[name]
    table, _alive = table_of(case)
    beta = "beta2" if "beta2" in case.rule.hyper_parameters else "b2"
    alternatives = [
        [{}, {"lr": 0.3}, {"lr": 0.3, "weight_decay": 0.7}],
        [{}, {beta: 0.5}, {beta: 0.5, "lr": 0.3}],
        [{"max_grad_norm": 0.2}, {}, {"weight_decay": 0.0}],
        [{"lr": torch.tensor(0.25)}, {"lr": 0.25}, {"lr": torch.tensor([0.125], dtype=F64), beta: 0.5}],
    ]
    for changes in alternatives:
        options = [as_options(case, **own) for own in changes]
        numbers = [tuple(float(v) if isinstance(v, torch.Tensor) else v for v in own) for own in options]
        for groups, steps in (([0, 1, 2], [1.0, 7.0, 5000.0]), ([2, 0, 0], [3.0, 3.0, 4.0]), ([1, 1, 1], [9.0] * 3)):
            expected = from_host(case, table, numbers, steps, groups)
            assert_scalars(table, from_device(case, table, options, steps, groups), expected)
            places = np.array([4, 0, 2], dtype=np.int64)  # counts of others lie between theirs
            flat = torch.zeros(6, dtype=F32)
            flat[places] = torch.tensor([s - 1 for s in steps], dtype=F32)
            assert_scalars(table, from_device(case, table, options, steps, groups, places, flat), expected)


def test_a_number_that_equals_another_groups_tensor_does_not_follow_it():
    """A tensor and a number that are equal by chance were taken for the same, and went on together."""
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    lr, flat = torch.tensor(0.5, dtype=F64), torch.zeros(len(SHAPES), dtype=F32)
    device = DeviceScalars(case.rule, table, flat, slice(None), np.array([0, 1, 1]))
    options = [as_options(case, lr=lr), as_options(case, lr=0.5)]
    device.update(options)
    lr.mul_(0.5)
    device.update(options)
    numbers = [as_options(case, lr=0.25), as_options(case, lr=0.5)]
    assert_scalars(table, written(table), from_host(case, table, numbers, [1.0] * 3, [0, 1, 1]))


def test_scalars_follow_options_and_tensors_that_change():
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    lr, flat = torch.tensor(0.25, dtype=F64), torch.zeros(len(SHAPES), dtype=F32)
    device = DeviceScalars(case.rule, table, flat, slice(None), np.zeros(len(SHAPES), dtype=np.int64))
    every = [{"lr": lr}, {"lr": lr}, {"lr": 0.1}, {"lr": 0.1, "beta1": 0.3}, {"lr": lr}]
    for step, changes in enumerate(every, start=1):
        lr.mul_(0.5)
        device.update([as_options(case, **changes)])
        now = written(table)
        numbers = [as_options(case, **{k: float(v) for k, v in changes.items()})]
        assert_scalars(table, now, from_host(case, table, numbers, [float(step)] * 3, [0] * 3))
        table.numbers[: len(table.scalars)] = now  # as the device left it
        device.count()
    assert flat.tolist() == [5.0] * len(SHAPES)


def test_scalars_follow_groups_that_become_alike_and_others_again():
    """A value that was written to some columns is not there in others."""
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    groups, flat = [0, 1, 2], torch.zeros(3, dtype=F32)
    device = DeviceScalars(case.rule, table, flat, slice(None), np.array(groups))
    for betas in ((0.99, 0.99, 0.5), (0.99, 0.5, 0.5), (0.5, 0.5, 0.99), (0.99, 0.99, 0.99), (0.99, 0.5, 0.99)):
        options = [as_options(case, beta2=beta) for beta in betas]
        device.update(options)
        now = written(table)
        assert_scalars(table, now, from_host(case, table, options, [1.0] * 3, groups))
        table.numbers[: len(table.scalars)] = now  # as the device left it


def test_a_step_with_an_infinity_does_not_count_on_a_device():
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    for places, expected in ((slice(None), [4.0, 4.0, 4.0]), (np.array([0, 2, 1]), [4.0, 4.0, 4.0])):
        flat = torch.tensor([3.0, 3.0, 3.0])
        device = DeviceScalars(case.rule, table, flat, places, np.zeros(3, dtype=np.int64))
        table.found_inf = torch.tensor([1.0])
        device.count()
        assert flat.tolist() == [3.0] * 3
        table.found_inf = torch.tensor(0.0)
        device.count()
        assert flat.tolist() == expected


SCHEDULES = ["warmup_linear", "warmup_constant", "warmup_poly", "warmup_cosine"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [-1, 0.0, 0.3])
@pytest.mark.parametrize("t_total", [-1, 20])
def test_bert_adams_schedules_on_a_device(schedule, warmup, t_total):
    case = BY_RULE["bert_adam"]
    table, _alive = table_of(case)
    options = [as_options(case, schedule=schedule, warmup=warmup, t_total=t_total)]
    for step in (1.0, 3.0, 6.0, 7.0, 20.0, 21.0, 30.0):
        steps, groups = [step, 1.0, step], [0] * 3
        ours, expected = (
            from_device(case, table, options, steps, groups),
            from_host(case, table, options, steps, groups),
        )
        if schedule == "warmup_cosine":  # a cosine may have other bits
            np.testing.assert_allclose(ours, expected, rtol=1e-15, atol=1e-17)
        else:
            assert_scalars(table, ours, expected)


@settings(max_examples=40, deadline=None)
@given(NUMBERS | st.integers(1, 50), st.floats(0, 0.9999), st.floats(0, 0.9999), st.floats(0, 10), st.booleans())
def test_any_options_at_any_step_give_the_bits_of_the_host(step, beta1, beta2, lr, warmup):
    changes = {"beta1": beta1, "beta2": beta2, "lr": lr, "ema_warmup": float(warmup)}
    for case in (BY_RULE["adam"], BY_RULE["ema_adam"], BY_RULE["adamp"]):
        table, _alive = table_of(case)
        options = [as_options(case, **{k: v for k, v in changes.items() if k in case.options})]
        steps, groups = [float(step)] * 3, [0] * 3
        expected = from_host(case, table, options, steps, groups)
        assert_scalars(table, from_device(case, table, options, steps, groups, twice=False), expected)


def test_the_options_here_are_those_of_the_rules():
    """A rule with a new option would otherwise be tested with its default alone."""
    for name, options in {"adam": ADAM, "ema_adam": EMA, "adamp": ADAMP, "bert_adam": BERT}.items():
        assert {*BY_RULE[name].rule.hyper_parameters} == options.keys()
    assert {case.rule.name for case in EVERY_CASE} == {*BY_RULE, "clip"}
