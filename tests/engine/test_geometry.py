"""How elements are cut into rows, segments and chunks."""

import numpy as np
import torch

from fusedadam import backends
from fusedadam.engine.geometry import Geometry
from fusedadam.engine.member import Member
from fusedadam.optimizers.adamp import adamp
from fusedadam.optimizers.adamw import adam
from fusedadam.rules.sums import SEGMENT

EAGER = backends.choose(torch.device("cpu"), "eager")


def geometry(rule, *shapes):
    flags = dict.fromkeys(rule.flags, False)
    specialized = rule.specialize({**flags, "matrix": True} if "matrix" in flags else flags)
    tensors = [torch.zeros(shape) for shape in shapes]
    return Geometry([Member(specialized, EAGER, dict.fromkeys(specialized.roles, t)) for t in tensors]), specialized


def test_a_tensor_is_one_row_unless_the_rule_sums_by_rows():
    shapes = (3, 4), (0, 4), (5,)
    plain, _ = geometry(adam, *shapes)
    assert plain.sizes.tolist() == [12, 0, 5]
    assert plain.rows.tolist() == [1, 0, 1]
    by_rows, _ = geometry(adamp, (3, 4), (0, 4), (5, 1))
    assert by_rows.rows.tolist() == [3, 0, 5]
    assert by_rows.widths.tolist() == [4, 0, 1]
    assert by_rows.all_rows.tolist() == [3, 0, 5]


def test_a_long_row_has_several_pieces_and_its_sum_must_be_combined():
    short, specialized = geometry(adamp, (2, 10))
    long, _ = geometry(adamp, (2, 10), (2, SEGMENT["element"] + 1))
    assert long.pieces.tolist() == [1, 2]
    assert long.segments["element"].tolist() == [2, 4]
    one = next(s for stage in specialized.stages for s in stage.sums if s.over == "row")
    assert not short.needs_combining(one)
    assert long.needs_combining(one)


def test_chunks_cover_every_element_once():
    own, specialized = geometry(adam, (7,), (0,), (20,))
    steps = np.full(3, 8)
    tensor, first = own.chunks(specialized.stages[0], steps)
    assert list(zip(tensor.tolist(), first.tolist(), strict=True)) == [(0, 0), (2, 0), (2, 8), (2, 16)]
    tensor, _ = own.chunks(specialized.stages[0], steps, only=np.array([True, True, False]))
    assert tensor.tolist() == [0]
