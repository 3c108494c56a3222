"""Launches: which members share one, and what one driver does for optimizers, operators and clipping."""

import numpy as np
import pytest
import torch

from fusedadam import backends
from fusedadam.engine.launch import Launches, norm_of
from fusedadam.engine.member import Member
from fusedadam.optimizers.adamw import adam

FLAGS = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": False}
OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}


def member(dtype=torch.float32, group=0, backend="numba", layout=lambda t: t, **flags):
    specialized = adam.specialize({**FLAGS, **flags})
    roles = {role: layout(torch.ones(4, 6, dtype=dtype)) for role in specialized.roles}
    return Member(specialized, backends.choose(torch.device("cpu"), backend), roles, group)


def prepared(*members):
    launches = Launches(members)
    launches.set_scalars([adam.scalars(step=1.0, **OPTIONS)], np.zeros(len(members), dtype=np.int64))
    return launches, [m.roles for m in members]


def test_groups_share_a_launch_and_dtypes_flags_and_backends_do_not():
    assert len(Launches([member(), member(group=1), member()])) == 1
    assert len(Launches([member(), member(torch.bfloat16)])) == 2
    assert len(Launches([member(), member(maximize=True)])) == 2
    assert len(Launches([member(), member(backend="eager")])) == 2


def test_it_counts_when_nothing_can_fail_anymore_and_before_the_first_write():
    launches, roles = prepared(member())
    seen = []
    launches.execute(roles, count=lambda: seen.append(roles[0]["param"].clone()))
    assert torch.equal(seen[0], torch.ones(4, 6))


def test_a_norm_is_over_all_launches():
    launches, roles = prepared(member(clipped=True), member(torch.bfloat16, clipped=True))
    launches.execute(roles)
    assert norm_of(launches, "grad_norm").item() == pytest.approx(48**0.5)
    assert norm_of(launches, "something else") is None
