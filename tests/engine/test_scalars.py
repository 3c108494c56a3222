"""The scalars of members whose steps the host counts."""

import numpy as np
import pytest
import torch

from fusedadam.engine.scalars import HostScalars
from fusedadam.engine.step_counts import HOST, StepCounts
from fusedadam.optimizers.adamw import adam
from tests.support import options_of

NAMES = adam.hyper_parameters


def options(lr):
    values = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
    return tuple(values[name] for name in NAMES)


def scalars(groups, counted, uncounted=()):
    return HostScalars(
        adam, np.array(groups), np.array(counted, dtype=np.int64), slice(None), np.array(uncounted, dtype=np.int64)
    )


def test_one_set_for_each_group_when_all_are_at_the_same_step():
    sets, whose = scalars([0, 1, 0], [0, 1, 2]).of(np.array([5.0, 5.0, 5.0]), options_of([options(0.1), options(0.2)]))
    assert len(sets) == 2
    assert whose.tolist() == [0, 1, 0]
    assert sets[0] == adam.scalars(step=5.0, **dict(zip(NAMES, options(0.1), strict=True)))


def test_one_set_for_each_step_that_occurs():
    sets, whose = scalars([0, 0, 0], [0, 1, 2]).of(np.array([5.0, 6.0, 5.0]), options_of([options(0.1)]))
    assert len(sets) == 2
    assert whose.tolist() == [0, 1, 0]


def test_a_member_without_elements_has_scalars_and_no_count():
    own = scalars([0, 1], [], uncounted=[0, 1])
    assert own
    assert not own.counts_any
    _, whose = own.of(np.zeros(0), options_of([options(0.1), options(0.2)]))
    assert len(set(whose.tolist())) == 2


def test_a_tensor_lr_is_read():
    with_tensor, _ = scalars([0], [0]).of(
        np.array([1.0]), options_of([options(torch.tensor(0.5, dtype=torch.float64))])
    )
    with_number, _ = scalars([0], [0]).of(np.array([1.0]), options_of([options(0.5)]))
    assert with_tensor == with_number


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0]])
def test_counts_are_read_and_set_at_their_places(order):
    counts, owners = StepCounts(), [object() for _ in range(3)]
    prepared = counts.prepare({o: float(k) for k, o in enumerate(owners)}, {}, HOST)
    states = {o: {} for o in owners}
    counts.take(prepared, states)
    mine = HostScalars(
        adam, np.zeros(3, dtype=np.int64), np.array(order), prepared.places(owners[k] for k in order), np.array([])
    )
    steps = counts.next(mine.places)
    assert steps.tolist() == [k + 1.0 for k in order]
    counts.set(mine.places, steps)
    assert [states[o]["step"].item() for o in owners] == [k + (k in order) for k in range(3)]
