"""Scalars on a device from step to step: options that change are sent, and steps are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedadam.engine.device_scalars import MOST_PASSED, DeviceScalars, _send
from tests.engine.test_device_scalars import (
    BY_RULE,
    ONE_GROUP,
    SHAPES,
    as_options,
    assert_same_bits,
    by_host,
    kernel_of,
    table_of,
    written,
)  # fmt: skip
from tests.support import F16, F32, F64

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")


class Watched:
    """How many kernels are made, and how often options are sent."""

    def __init__(self, monkeypatch):
        self.made = self.sent = 0
        words = DeviceScalars._words

        def watched_words(kernel, *arguments):
            self.sent += 1
            return words(kernel, *arguments)

        monkeypatch.setattr(DeviceScalars, "_words", watched_words)

    def kernel_of(self, case, table, *arguments):
        kernels = table.backend.scalars

        def evaluate(launch):
            self.made += 1
            return kernels.evaluate(launch)

        table.backend = table.backend._replace(scalars=kernels._replace(evaluate=evaluate))
        return kernel_of(case, table, *arguments)


def test_options_are_sent_when_they_change_and_nothing_is_compiled_again(monkeypatch):
    case, watched = BY_RULE["adam"], Watched(monkeypatch)
    table, _alive = table_of(case)
    kernel = watched.kernel_of(case, table, torch.zeros(4))
    options = [as_options(case)] * 3
    for _ in range(3):
        kernel.update(list(options))
        kernel.count()
    assert (watched.made, watched.sent) == (1, 1)
    for lr in (0.1, 0.2, 0.3):
        kernel.update([as_options(case, lr=lr), as_options(case, lr=2 * lr), as_options(case, beta2=lr)])
    assert (watched.made, watched.sent) == (2, 4), "another table of powers needs more memory, once"
    kernel.update([as_options(case, lr=torch.tensor(0.1)), *options[1:]])
    assert watched.made == 3, "a tensor is read by another kernel"


def test_a_scheduled_number_is_sent_alone_and_has_the_bits_of_the_host(monkeypatch):
    case, watched = BY_RULE["adam"], Watched(monkeypatch)
    table, _alive = table_of(case)
    kernel = watched.kernel_of(case, table, None)
    assert not kernel.follow([as_options(case)] * 3), "it has no options yet"
    kernel.update([as_options(case)] * 3, 1)
    for step, lr in enumerate((0.1, 0.2, 0.3), start=2):
        options = [as_options(case, lr=lr), as_options(case, lr=2 * lr), as_options(case, weight_decay=lr)]
        assert kernel.follow(options)
        kernel.update(options, step)
        assert_same_bits(written(table), by_host(case, table, options, [step] * len(SHAPES)))
    assert (watched.made, watched.sent) == (1, 1)


@pytest.mark.parametrize("groups", [1, 2, 4, 5])
def test_a_learning_rate_is_an_argument_of_the_kernel_where_there_are_few_groups(monkeypatch, groups):
    case, watched = BY_RULE["adam"], Watched(monkeypatch)
    table, _alive = table_of(case)
    group_of = np.arange(len(SHAPES)) % groups
    kernel = watched.kernel_of(case, table, None, slice(None), group_of)
    sent = []
    kernel.update([as_options(case)] * groups, 1)
    monkeypatch.setattr(
        "fusedadam.engine.device_scalars._send", lambda *args, send=_send: sent.append(1) or send(*args)
    )
    for step, lr in enumerate((0.0, 0.1, 1e300, 0.3), start=2):
        options = [as_options(case, lr=lr * (1 + k)) for k in range(groups)]
        assert kernel.follow(options)
        kernel.update(options, step)
        assert_same_bits(written(table), by_host(case, table, options, [step] * len(SHAPES), group_of))
    assert len(sent) == (4 if len({*group_of}) > MOST_PASSED else 0)
    assert kernel.follow([as_options(case, lr=0.3, weight_decay=0.2)] * groups)
    assert sent, "a weight decay is sent"


@pytest.mark.parametrize("other", [{"beta1": 0.5}, {"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.1, dtype=F16)}])
def test_what_needs_more_than_numbers_is_not_followed(other):
    """Another table of powers takes longer to make than the host takes for the scalars; a tensor is read elsewhere."""
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    kernel = kernel_of(case, table, torch.zeros(4))
    options = [as_options(case)] * 3
    changed = [as_options(case), as_options(case, **other), as_options(case)]
    for before, after in ((options, changed), (changed, options)):
        kernel.update(before)
        assert not kernel.follow(after)
    kernel.update(options)
    assert kernel.follow(options)


def test_a_tensor_whose_memory_is_replaced_is_read_where_it_is(monkeypatch):
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    kernel = kernel_of(case, table, torch.zeros(4), groups=ONE_GROUP)
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
        kernel.update(options)
        assert table.numbers[size].tolist() == [lr.item()] * 4


def test_what_is_made_in_inference_mode_is_written_outside_it():
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    kernel = kernel_of(case, table, torch.zeros(4), groups=ONE_GROUP)
    size = table.scalars.index("step_size")
    lr = torch.tensor(0.5, dtype=F16)
    with torch.inference_mode():
        kernel.update([as_options(case, lr=lr, beta1=0.0)])
    for value in (0.25, 2.0):
        lr.fill_(value)
        kernel.update([as_options(case, lr=lr, beta1=0.0)])
        assert table.numbers[size].tolist() == [value] * 4


@pytest.mark.parametrize("take", ["update", "follow"])
def test_an_update_that_was_interrupted_is_made_again(monkeypatch, take):
    """Options that were only half sent must not be taken for the present ones."""
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    kernel = kernel_of(case, table, torch.zeros(4))
    options = [as_options(case, beta1=0.0)] * 3
    kernel.update(options)
    changed = [as_options(case, lr=7.0, beta1=0.0)] * 3
    with monkeypatch.context() as patch:

        def interrupted(words, there, count):
            raise KeyboardInterrupt

        patch.setattr("fusedadam.engine.device_scalars._send", interrupted)
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
    kernel = kernel_of(case, table, flat, places)
    for found_inf, counted in ((None, 1), (torch.ones(1), 0), (torch.tensor(0.0), 1), (torch.tensor([np.nan]), 0)):
        table.found_inf = None if found_inf is None else found_inf.float()
        kernel.count()
        before[places] += counted
        assert torch.equal(flat, before)


def test_a_number_that_equals_another_groups_tensor_does_not_follow_it():
    """A tensor and a number that are equal by chance were taken for the same, and went on together."""
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    lr = torch.tensor(0.5, dtype=F64)
    kernel = kernel_of(case, table, torch.zeros(4))
    options = [as_options(case, lr=lr), as_options(case, lr=0.5), as_options(case)]
    kernel.update(options)
    lr.mul_(0.5)
    kernel.update(options)
    assert_same_bits(written(table), by_host(case, table, options, [1.0] * 4))


def test_scalars_follow_options_and_tensors_that_change():
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    lr, flat = torch.tensor(0.25, dtype=F64), torch.zeros(4)
    kernel = kernel_of(case, table, flat, groups=ONE_GROUP)
    every = [{"lr": lr}, {"lr": lr}, {"lr": 0.1}, {"lr": 0.1, "beta1": 0.3}, {"lr": lr}]
    for step, changes in enumerate(every, start=1):
        lr.mul_(0.5)
        options = [as_options(case, **changes)]
        kernel.update(options)
        assert_same_bits(written(table), by_host(case, table, options, [step] * 4, ONE_GROUP))
        kernel.count()
    assert flat.tolist() == [5.0] * 4


def test_scalars_follow_groups_that_become_alike_and_others_again():
    case = BY_RULE["adam"]
    table, _alive = table_of(case)
    kernel = kernel_of(case, table, torch.zeros(4))
    for betas in ((0.99, 0.99, 0.5), (0.99, 0.5, 0.5), (0.5, 0.5, 0.99), (0.99, 0.99, 0.99), (0.99, 0.5, 0.99)):
        options = [as_options(case, beta2=beta) for beta in betas]
        kernel.update(options)
        assert_same_bits(written(table), by_host(case, table, options, [1.0] * 4))
