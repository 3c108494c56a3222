"""Scalars that a device computes have the bits of the host's, for whatever options there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedadam
from fusedadam import backends
from fusedadam.engine.device_scalars import DeviceScalars
from fusedadam.engine.launch_table import STEP, LaunchTable
from fusedadam.engine.member import Member
from fusedadam.rules.counts import LAST
from fusedadam.schedules import SCHEDULES
from tests.rules.test_counts import NUMBERS
from tests.rules.test_tracing import ALLOWED, defined
from tests.support import ADAM, ADAMP, BERT, BF16, CASES, EMA, F16, F32, F64, SUMMING, Case, draw

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
EVERY_CASE = [*CASES, *SUMMING]
BY_RULE = {case.rule.name: case for case in EVERY_CASE if "max_grad_norm" in case.options}
SHAPES = [(5, 4), (3, 2, 2), (6, 1), (2, 2)]
GROUPS = np.array([0, 1, 2, 1])
ONE_GROUP = np.zeros(4, dtype=np.int64)
COUNTS = [0.0, 6.0, 4999.0, 2.0**24 - 1]


def table_of(case, shapes=SHAPES):
    roles = draw(case, shapes, [F32])
    specialized = case.rule.specialize(case.flags, roles[0]["param"])
    backend = backends.choose(torch.device("cpu"), "triton")
    members = [Member(specialized, backend, own) for own in roles]
    return LaunchTable(range(len(roles)), members), roles


def as_options(case, **changes):
    values = {**case.options, **changes}
    return tuple(values[name] for name in case.rule.hyper_parameters)


def kernel_of(case, table, flat, places=slice(None), groups=GROUPS):
    return DeviceScalars(case.rule, table, flat, places, groups)


def by_host(case, table, options, steps, groups=GROUPS):
    """The scalars that the host computes, member by member; the table stays as it is."""
    numbers = [tuple(float(v.detach()) if isinstance(v, torch.Tensor) else v for v in own) for own in options]
    keys = [(numbers[group], float(step)) for group, step in zip(groups, steps, strict=True)]
    scalars, order = case.rule.scalars_of(keys)
    return np.array([[float(scalars[k][name]) for k in order] for name in table.scalars])


def written(table):
    return table.numbers[: len(table.scalars)]


def assert_same_bits(ours, expected):
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(ours.view(np.int64), expected.view(np.int64))


def check(case, table, options, counts=COUNTS, places=slice(None), groups=GROUPS):
    """The kernel writes the bits of the host."""
    flat = torch.tensor(counts, dtype=F32)
    kernel = kernel_of(case, table, flat, places, groups)
    written(table).fill(np.nan)
    kernel.update(options)
    steps = flat.numpy()[places] + np.float32(1)
    assert_same_bits(written(table), by_host(case, table, options, steps, groups))


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda c: c.id)
def test_a_device_writes_the_scalars_of_the_host(case):
    table, _alive = table_of(case)
    if case.rule.name == "clip":  # it has neither betas nor a learning rate
        changes = [{}, {"max_norm": 0.3}, {"order": 5.0}]
    else:
        beta = "beta2" if "beta2" in case.rule.hyper_parameters else "b2"
        changes = [{}, {"lr": 0.3, "weight_decay": 0.7}, {beta: 0.5, "lr": 1e-5, "max_grad_norm": 2.0}]
    options = [as_options(case, **own) for own in changes]
    check(case, table, options)
    places = np.array([5, 0, 3, 1])  # counts of others lie between theirs
    check(case, table, options, [1.0, 2.0, 77.0, 4095.0, 9.0, 4096.0], places)


LIVE = [
    torch.tensor(0.3, dtype=F32),
    torch.tensor([0.3], dtype=F64),
    torch.tensor(0.3, dtype=F16),
    torch.tensor(0.3, dtype=BF16),
    torch.tensor(2),
    torch.nn.Parameter(torch.tensor(0.7)),
    torch._neg_view(torch.tensor(-0.3)),
    0.3,
]


@pytest.mark.parametrize("name", [name for name in BY_RULE if name != "adafactor"])
def test_tensors_and_numbers_in_any_mix(name):
    case = BY_RULE[name]
    table, _alive = table_of(case)
    for lr, other in itertools.product(LIVE, LIVE):
        options = [as_options(case, lr=lr), as_options(case, lr=other, weight_decay=lr), as_options(case)]
        check(case, table, options)


@pytest.mark.parametrize("compute", ALLOWED, ids=range(len(ALLOWED)))
def test_whatever_scalars_may_do_has_the_bits_of_the_host(compute):
    made = defined(lambda step, lr, beta: {"x": compute(step, lr, beta)})
    case = Case(made, {}, {"lr": 0.3, "beta": 0.9})
    table, _alive = table_of(case)
    for lr in (0.3, 0.0, torch.tensor(0.3)):
        options = [as_options(case, lr=lr), as_options(case, beta=0.5), as_options(case, lr=-0.7)]
        check(case, table, options)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(NUMBERS | st.integers(1, 50), min_size=4, max_size=4),
    st.floats(0, 0.9999), st.floats(0, 0.9999), st.floats(0, 10), st.booleans(),
)  # fmt: skip
def test_any_options_at_any_step(steps, beta1, beta2, lr, warmup):
    for case in (BY_RULE["adam"], BY_RULE["ema_adam"], BY_RULE["adamp"]):
        table, _alive = table_of(case)
        own = {"ema_warmup": float(warmup)} if "ema_warmup" in case.options else {}
        betas = (beta1, beta2), (beta2, beta1), (0.9, beta1)
        options = [as_options(case, beta1=b1, beta2=b2, lr=lr, **own) for b1, b2 in betas]
        check(case, table, options, [float(step - 1) for step in steps])


@pytest.mark.parametrize("count", [2.0**24, LAST - 1.0, LAST + 1.0, 1e9])
def test_a_count_beyond_the_tables(count):
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    check(case, table, [as_options(case, beta1=0.9999999)] * 3, [count, 1.0, 2.0, count])


def test_groups_with_schedules_of_their_own():
    """A schedule is another list of operations, so each has a kernel of its own."""
    case = BY_RULE["bert_adam"]
    table, _alive = table_of(case)
    for chosen in itertools.permutations(SCHEDULES, 3):
        options = [as_options(case, schedule=s, t_total=20.0, warmup=0.3) for s in chosen]
        check(case, table, options, [3.0, 8.0, 11.0, 2.0])


def test_more_members_than_a_program_has_lanes():
    case = BY_RULE["adam"]
    shapes = [(2, 2)] * 300
    table, _alive = table_of(case, shapes)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 2**24, 300).astype(np.float32)
    options = [as_options(case, lr=0.1 * k) for k in range(3)]
    places = rng.permutation(300)
    check(case, table, options, counts.tolist(), places, rng.integers(0, 3, 300))


def test_the_number_of_the_step_for_the_noise_of_stochastic_rounding():
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    param.grad = torch.ones_like(param)
    optimizer = fusedadam.AdamW([param], backend="triton", storage="16bit")
    optimizer.step()
    (launch,) = optimizer._stepper.last_plan.launches
    table = launch.table
    assert table.is_stochastic
    kernel = DeviceScalars(optimizer.rule, table, torch.tensor([41.0]), slice(None), np.zeros(1, dtype=np.int64))
    kernel.update(optimizer._stepper.read(optimizer.param_groups).hyper_parameters)
    assert table.words[table.fields[STEP]].tolist() == [42]


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda c: c.id)
def test_where_the_host_counts_the_number_of_the_step_is_an_argument(case):
    """The bits are those that the host computes."""
    table, _ = table_of(case)
    numbers = [as_options(case, **({"lr": lr} if "lr" in case.options else {})) for lr in (1e-2, 3e-4, 5e-3)]
    kernel = kernel_of(case, table, None)
    for step in (1, 2, 64, 4097, 2**24 + 1):
        written(table).fill(np.nan)
        kernel.update(numbers, step)
        assert_same_bits(written(table), by_host(case, table, numbers, [step] * len(SHAPES)))


def test_ademamix_warms_up_on_a_device():
    case = BY_RULE["ademamix"]
    table, _alive = table_of(case)
    options = [as_options(case, schedule="warmup", beta3_warmup=12.0, alpha_warmup=7.0)] * 3
    for counts in ([0.0, 5.0, 10.0, 11.0], [4096.0, 2.0, 0.0, 6.0]):
        check(case, table, options, counts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [-1, 0.0, 0.3])
@pytest.mark.parametrize("t_total", [-1, 20])
def test_bert_adams_schedules_on_a_device(schedule, warmup, t_total):
    case = BY_RULE["bert_adam"]
    table, _alive = table_of(case)
    options = [as_options(case, schedule=schedule, warmup=warmup, t_total=t_total)] * 3
    for counts in ([0.0, 2.0, 5.0, 6.0], [19.0, 20.0, 29.0, 0.0]):
        check(case, table, options, counts)


def test_the_options_here_are_those_of_the_rules():
    """A rule with a new option would otherwise be tested with its default alone."""
    for name, options in {"adam": ADAM, "ema_adam": EMA, "adamp": ADAMP, "bert_adam": BERT}.items():
        assert {*BY_RULE[name].rule.hyper_parameters} == options.keys()
    assert {case.rule.name for case in EVERY_CASE} == {*BY_RULE, "clip"}
