"""Members as a table of words: what is in which row, and what is sent."""

import ctypes

import numpy as np
import torch

from fusedadam import backends
from fusedadam.engine.launch_table import GRADS_ANYWHERE, HAS_GRAD, LaunchTable
from fusedadam.engine.member import Member
from fusedadam.optimizers.adamw import adam

FLAGS = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": False}


def table(*shapes, layout=lambda t: t, indices=None):
    backend = backends.choose(torch.device("cpu"), "numba")
    roles = [{r: layout(torch.zeros(shape)) for r in adam.specialize(FLAGS).roles} for shape in shapes]
    all_members = [Member(adam.specialize(FLAGS), backend, own) for own in roles]
    return LaunchTable(indices or range(len(shapes)), all_members), roles


def test_fields_are_scalars_then_roles_then_what_stays_then_values():
    own, roles = table((3,), (4, 5))
    names = list(own.fields)
    assert names[: len(own.scalars)] == own.scalars
    assert names[len(own.scalars) :][:4] == ["param", "grad", "exp_avg", "exp_avg_sq"]
    assert own.words[own.fields["exp_avg"]].tolist() == [r["exp_avg"].data_ptr() for r in roles]
    assert own.words[own.fields["_size"]].tolist() == [3, 20]
    assert own.value(HAS_GRAD).tolist() == own.value(GRADS_ANYWHERE).tolist() == [1.0, 1.0]


def test_it_serves_some_of_all_members():
    own, _ = table((3,), (4,), (5,), indices=[0, 2])
    assert own.sizes.tolist() == [3, 5]
    sets = [dict.fromkeys(own.scalars, 1.0), dict.fromkeys(own.scalars, 2.0)]
    own.set_scalars(sets, np.array([0, 0, 1]))
    assert own.numbers[: len(own.scalars)].tolist() == [[1.0, 2.0]] * len(own.scalars)
    own.place(np.arange(8).reshape(4, 2))
    assert own.words[own.fields["grad"]].tolist() == [2, 3]


def test_an_entry_is_the_address_of_a_word():
    own, _ = table((3,), (4,))
    own.words[own.fields["_size"], 1] = 77
    word = torch.frombuffer(ctypes.c_int64.from_address(own.entry("_size", 1)), dtype=torch.int64)
    assert word.item() == 77


def test_layouts_that_kernels_cannot_walk_are_copied():
    assert table((4, 6))[0].copied == []
    own, _ = table((4, 6), layout=lambda t: t[:, ::2])
    assert {role for role, _ in own.copied} == {"param", "grad", "exp_avg", "exp_avg_sq"}
