"""Scalars by a kernel have the bits of torch's operations, for whatever options there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedadam
from fusedadam import backends
from fusedadam.backends import triton
from fusedadam.engine.device_scalars import DeviceScalars
from fusedadam.engine.host_scalars import HostScalars
from fusedadam.engine.launch_table import STEP, LaunchTable
from fusedadam.engine.member import Member
from fusedadam.engine.scalar_kernel import MOST_PASSED, ScalarKernel, _send
from fusedadam.engine.scalar_operations import ScalarOperations
from fusedadam.rules.counts import LAST
from tests.engine.test_device_scalars import BY_RULE, EVERY_CASE, as_options
from tests.rules.test_counts import NUMBERS
from tests.rules.test_tracing import ALLOWED, defined
from tests.support import BF16, F16, F32, F64, Case, draw

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
SHAPES = [(5, 4), (3, 2, 2), (6, 1), (2, 2)]
GROUPS = np.array([0, 1, 2, 1])
# a power of the step, as Adafactor's, has other bits on a device: torch operations compute it
WITH_KERNEL = [case for case in EVERY_CASE if case.rule.name != "adafactor"]
COUNTS = [0.0, 6.0, 4999.0, 2.0**24 - 1]


def table_of(case, shapes=SHAPES):
    roles = draw(case, shapes, [F32])
    specialized = case.rule.specialize(case.flags, roles[0]["param"])
    backend = backends.choose(torch.device("cpu"), "triton")
    members = [Member(specialized, backend, own) for own in roles]
    return LaunchTable(range(len(roles)), members), roles


def both(case, table, options, counts=COUNTS, places=slice(None), groups=GROUPS):
    """The scalars by the kernel and by torch's operations."""
    flat = torch.tensor(counts, dtype=F32)
    kernels = table.backend.scalars
    written = []
    for device in (
        ScalarKernel(kernels, case.rule, table, flat, places, groups),
        ScalarOperations(case.rule, table, flat, places, groups),
    ):
        table.numbers[: len(table.scalars)] = np.nan
        device.update(options)
        written.append(table.numbers[: len(table.scalars)].copy())
    return written


def assert_same_bits(one, two):
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one.view(np.int64), two.view(np.int64))


@pytest.mark.parametrize("case", WITH_KERNEL, ids=lambda c: c.id)
def test_a_kernel_writes_the_bits_of_the_operations(case):
    table, _alive = table_of(case)
    if case.rule.name == "clip":  # it has neither betas nor a learning rate
        changes = [{}, {"max_norm": 0.3}, {"order": 5.0}]
    else:
        beta = "beta2" if "beta2" in case.rule.hyper_parameters else "b2"
        changes = [{}, {"lr": 0.3, "weight_decay": 0.7}, {beta: 0.5, "lr": 1e-5, "max_grad_norm": 2.0}]
    options = [as_options(case, **own) for own in changes]
    assert_same_bits(*both(case, table, options))
    places = np.array([5, 0, 3, 1])  # counts of others lie between theirs
    assert_same_bits(*both(case, table, options, [1.0, 2.0, 77.0, 4095.0, 9.0, 4096.0], places))


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
        assert_same_bits(*both(case, table, options))


@pytest.mark.parametrize("compute", ALLOWED, ids=range(len(ALLOWED)))
def test_whatever_scalars_may_do_has_the_bits_of_the_operations(compute):
    made = defined(lambda step, lr, beta: {"x": compute(step, lr, beta)})
    case = Case(made, {}, {"lr": 0.3, "beta": 0.9})
    table, _alive = table_of(case)
    for lr in (0.3, 0.0, torch.tensor(0.3)):
        options = [as_options(case, lr=lr), as_options(case, beta=0.5), as_options(case, lr=-0.7)]
        assert_same_bits(*both(case, table, options))


@settings(max_examples=25, deadline=None)
@given(st.lists(NUMBERS, min_size=4, max_size=4), st.floats(0, 0.9999), st.floats(0, 0.9999), st.floats(0, 10))
def test_any_options_at_any_step(steps, beta1, beta2, lr):
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    options = [as_options(case, beta1=b1, beta2=b2, lr=lr) for b1, b2 in ((beta1, beta2), (beta2, beta1), (0.9, beta1))]
    assert_same_bits(*both(case, table, options, [float(step - 1) for step in steps]))


@pytest.mark.parametrize("count", [2.0**24, LAST - 1.0, LAST + 1.0, 1e9])
def test_a_count_beyond_the_tables(count):
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    assert_same_bits(*both(case, table, [as_options(case, beta1=0.9999999)] * 3, [count, 1.0, 2.0, count]))


def test_groups_with_schedules_of_their_own():
    """A schedule is another list of operations, so each has a kernel of its own."""
    case = BY_RULE["bert_adam"]
    table, _alive = table_of(case)
    schedules = ["warmup_linear", "warmup_constant", "warmup_poly", "warmup_cosine"]
    for chosen in itertools.permutations(schedules, 3):
        options = [as_options(case, schedule=s, t_total=20.0, warmup=0.3) for s in chosen]
        one, two = both(case, table, options, [3.0, 8.0, 11.0, 2.0])
        np.testing.assert_allclose(one, two, rtol=0 if "warmup_cosine" not in chosen else 1e-15, atol=1e-17)


def test_more_members_than_a_program_has_lanes():
    case = BY_RULE["adam"]
    shapes = [(2, 2)] * 300
    table, _alive = table_of(case, shapes)
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 2**24, 300).astype(np.float32)
    options = [as_options(case, lr=0.1 * k) for k in range(3)]
    places = rng.permutation(300)
    assert_same_bits(*both(case, table, options, counts.tolist(), places, rng.integers(0, 3, 300)))


def test_the_number_of_the_step_for_the_noise_of_stochastic_rounding():
    param = torch.nn.Parameter(torch.ones(64, 64, dtype=BF16))
    param.grad = torch.ones_like(param)
    optimizer = fusedadam.AdamW([param], backend="triton", storage="16bit")
    optimizer.step()
    (launch,) = optimizer._stepper.plan.launches
    table = launch.table
    assert table.is_stochastic
    device = DeviceScalars(optimizer.rule, table, torch.tensor([41.0]), slice(None), np.zeros(1, dtype=np.int64))
    device.update(optimizer._stepper.read(optimizer.param_groups).hyper_parameters)
    assert table.words[table.fields[STEP]].tolist() == [42]


@pytest.mark.parametrize("case", WITH_KERNEL, ids=lambda c: c.id)
def test_where_the_host_counts_the_number_of_the_step_is_an_argument(case):
    """The bits are those that the host computes, unless a cosine is among them: then it is left to the host."""
    table, _ = table_of(case)
    numbers = [as_options(case, **({"lr": lr} if "lr" in case.options else {})) for lr in (1e-2, 3e-4, 5e-3)]
    kernel = ScalarKernel(table.backend.scalars, case.rule, table, None, slice(None), GROUPS)
    host = HostScalars(case.rule, GROUPS, np.arange(len(SHAPES)), slice(None), np.array([], dtype=np.int64))
    for step in (1, 2, 64, 4097, 2**24 + 1):
        table.set_scalars(*host.of(float(step), numbers))
        expected = table.numbers[: len(table.scalars)].copy()
        table.numbers[: len(table.scalars)] = np.nan
        if kernel.update(numbers, step):
            assert_same_bits(table.numbers[: len(table.scalars)], expected)
        else:
            assert not case.rule.scalar_program(tuple(strings(case, numbers[0]))).is_exact


def strings(case, options):
    return [(n, v) for n, v in zip(case.rule.hyper_parameters, options, strict=True) if isinstance(v, str)]


class Watched:
    """How many kernels are made, and how often options are sent."""

    def __init__(self, monkeypatch):
        self.made = self.sent = 0
        evaluate, words = triton.SCALARS.evaluate, ScalarKernel._words

        def watched_evaluate(launch):
            self.made += 1
            return evaluate(launch)

        def watched_words(kernel, *arguments):
            self.sent += 1
            return words(kernel, *arguments)

        self.kernels = triton.SCALARS._replace(evaluate=watched_evaluate)
        monkeypatch.setattr(ScalarKernel, "_words", watched_words)


def test_options_are_sent_when_they_change_and_nothing_is_compiled_again(monkeypatch):
    case, watched = BY_RULE["adam"], Watched(monkeypatch)
    table, _alive = table_of(case)
    kernel = ScalarKernel(watched.kernels, case.rule, table, torch.zeros(4), slice(None), GROUPS)
    options = [as_options(case)] * 3
    for _ in range(3):
        assert kernel.update(list(options))
        kernel.count()
    assert (watched.made, watched.sent) == (1, 1)
    for lr in (0.1, 0.2, 0.3):
        assert kernel.update([as_options(case, lr=lr), as_options(case, lr=2 * lr), as_options(case, beta2=lr)])
    assert (watched.made, watched.sent) == (2, 4), "another table of powers needs more memory, once"
    assert kernel.update([as_options(case, lr=torch.tensor(0.1)), *options[1:]])
    assert watched.made == 3, "a tensor is read by another kernel"


def test_a_scheduled_number_is_sent_alone_and_has_the_bits_of_the_host(monkeypatch):
    case, watched = BY_RULE["adam"], Watched(monkeypatch)
    table, _alive = table_of(case)
    kernel = ScalarKernel(watched.kernels, case.rule, table, None, slice(None), GROUPS)
    host = HostScalars(case.rule, GROUPS, np.arange(len(SHAPES)), slice(None), np.array([], dtype=np.int64))
    assert not kernel.follow([as_options(case)] * 3), "it has no options yet"
    assert kernel.update([as_options(case)] * 3, 1)
    for step, lr in enumerate((0.1, 0.2, 0.3), start=2):
        options = [as_options(case, lr=lr), as_options(case, lr=2 * lr), as_options(case, weight_decay=lr)]
        assert kernel.follow(options)
        assert kernel.update(options, step)
        found = table.numbers[: len(table.scalars)].copy()
        table.set_scalars(*host.of(float(step), options))
        assert_same_bits(found, table.numbers[: len(table.scalars)])
    assert (watched.made, watched.sent) == (1, 1)


def test_a_rule_with_a_power_of_the_step_has_no_kernel():
    assert BY_RULE["adafactor"].rule.scalar_program(()) is None


@pytest.mark.parametrize("groups", [1, 2, 4, 5])
def test_a_learning_rate_is_an_argument_of_the_kernel_where_there_are_few_groups(monkeypatch, groups):
    case, watched = BY_RULE["adam"], Watched(monkeypatch)
    table, _alive = table_of(case)
    group_of = np.arange(len(SHAPES)) % groups
    kernel = ScalarKernel(watched.kernels, case.rule, table, None, slice(None), group_of)
    host = HostScalars(case.rule, group_of, np.arange(len(SHAPES)), slice(None), np.array([], dtype=np.int64))
    sent = []
    assert kernel.update([as_options(case)] * groups, 1)
    monkeypatch.setattr("fusedadam.engine.scalar_kernel._send", lambda *args, send=_send: sent.append(1) or send(*args))
    for step, lr in enumerate((0.0, 0.1, 1e300, 0.3), start=2):
        options = [as_options(case, lr=lr * (1 + k)) for k in range(groups)]
        assert kernel.follow(options)
        assert kernel.update(options, step)
        found = table.numbers[: len(table.scalars)].copy()
        table.set_scalars(*host.of(float(step), options))
        assert_same_bits(found, table.numbers[: len(table.scalars)])
    assert len(sent) == (4 if len({*group_of}) > MOST_PASSED else 0)
    assert kernel.follow([as_options(case, lr=0.3, weight_decay=0.2)] * groups)
    assert sent, "a weight decay is sent"


@pytest.mark.parametrize("other", [{"beta1": 0.5}, {"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.1, dtype=F16)}])
def test_what_needs_more_than_numbers_is_not_followed(other):
    """Another table of powers takes longer to make than the host takes for the scalars; a tensor is read elsewhere."""
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    kernel = ScalarKernel(table.backend.scalars, case.rule, table, torch.zeros(4), slice(None), GROUPS)
    options = [as_options(case)] * 3
    changed = [as_options(case), as_options(case, **other), as_options(case)]
    for before, after in ((options, changed), (changed, options)):
        assert kernel.update(before)
        assert not kernel.follow(after)
    assert kernel.update(options)
    assert kernel.follow(options)


def test_a_tensor_whose_memory_is_replaced_is_read_where_it_is(monkeypatch):
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    device = DeviceScalars(case.rule, table, torch.zeros(4), slice(None), np.zeros(4, dtype=np.int64))
    lr, size = torch.tensor(0.5), table.scalars.index("step_size")
    options = [as_options(case, lr=lr, beta1=0.0)]
    for change in (
        lambda: None,
        lambda: lr.mul_(0.5),
        lambda: lr.set_(torch.tensor(0.75)),
        lambda: setattr(lr, "data", torch.tensor(0.125, dtype=F64)),
        lambda: lr.mul_(3.0),
        lambda: setattr(lr, "data", torch.tensor(3, dtype=torch.int64)),
        lambda: lr.add_(1),
    ):
        change()
        device.update(options)
        assert table.numbers[size].tolist() == [lr.item()] * 4


def test_what_is_made_in_inference_mode_is_written_outside_it():
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    device = DeviceScalars(case.rule, table, torch.zeros(4), slice(None), np.zeros(4, dtype=np.int64))
    size = table.scalars.index("step_size")
    lr = torch.tensor(0.5, dtype=F16)
    with torch.inference_mode():
        device.update([as_options(case, lr=lr, beta1=0.0)])
    for value in (0.25, 2.0):
        lr.fill_(value)
        device.update([as_options(case, lr=lr, beta1=0.0)])
        assert table.numbers[size].tolist() == [value] * 4


@pytest.mark.parametrize("take", ["update", "follow"])
def test_an_update_that_was_interrupted_is_made_again(monkeypatch, take):
    """Options that were only half sent must not be taken for the present ones."""
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    kernel = ScalarKernel(table.backend.scalars, case.rule, table, torch.zeros(4), slice(None), GROUPS)
    options = [as_options(case, beta1=0.0)] * 3
    kernel.update(options)
    changed = [as_options(case, lr=7.0, beta1=0.0)] * 3
    with monkeypatch.context() as patch:

        def interrupted(words, there, count):
            raise KeyboardInterrupt

        patch.setattr("fusedadam.engine.scalar_kernel._send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(kernel, take)(changed)
    assert not kernel.follow(options)
    assert not kernel.follow(changed)
    kernel.update(changed)
    assert table.numbers[table.scalars.index("step_size")].tolist() == [7.0] * 4


@pytest.mark.parametrize("places", [slice(None), np.array([3, 0, 5, 1])])
def test_a_step_counts_unless_there_is_an_infinity(places):
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    length = 4 if isinstance(places, slice) else 6
    flat = torch.arange(length, dtype=F32)
    before = flat.clone()
    device = DeviceScalars(case.rule, table, flat, places, GROUPS)
    for found_inf, counted in ((None, 1), (torch.ones(1), 0), (torch.tensor(0.0), 1), (torch.tensor([np.nan]), 0)):
        table.found_inf = None if found_inf is None else found_inf.float()
        device.count()
        before[places] += counted
        assert torch.equal(flat, before)
