"""A rule that sums, in stages: what each of them reads and writes, and when roles are stored."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from fusedadam.optimizers.adamp import adamp
from fusedadam.optimizers.adamw import adam
from fusedadam.rules.rule import PARAM_SCALARS
from tests.support import ADAMP, BF16, F32, F64, Case, apply, assert_same_bits, draw


def moved(specialized, itemsize=4):
    return sum(itemsize * (len(s.reads) + len(s.writes)) for s in specialized.stages if s.space == "element")


def test_stages_move_no_more_bytes_than_they_must():
    flags = {"nesterov": False, "maximize": False, "clipped": False, "matrix": True}
    assert moved(adamp.specialize(flags)) == 40
    assert moved(adamp.specialize({**flags, "matrix": False})) == 28
    assert moved(adamp.specialize({**flags, "nesterov": True})) == 44
    assert moved(adamp.specialize({**flags, "clipped": True})) == 44
    flags = {"amsgrad": False, "maximize": False, "decoupled": True, "clipped": True}
    assert moved(adam.specialize(flags)) == 32


def test_no_stage_returns_a_tuple_of_one():
    """Triton 3.2 does not compile it, and the interpreter, which most tests run, does not mind."""
    flags = {"nesterov": False, "maximize": False, "clipped": True, "matrix": True}
    stages = [stage for stage in adamp.specialize(flags).stages if not stage.is_empty]
    single = [stage for stage in stages if len(stage.writes) + len(stage.sums) == 1]
    assert single
    for stage in single:
        assert not stage.results.endswith(",")
        assert not re.search(r"return \(?\w+,\)?$", stage.functions[-1], re.MULTILINE)


def test_adamp_has_one_round_and_with_clipping_two():
    def spaces(**flags):
        specialized = adamp.specialize({"nesterov": False, "maximize": True, "clipped": False, "matrix": True, **flags})
        return [stage.space for stage in specialized.stages]

    round_of_rows = ["element", "row", "tensor", "row"]
    assert spaces() == [*round_of_rows, "element"]
    assert spaces(matrix=False) == ["element"]
    assert spaces(clipped=True) == ["element", "row", "tensor", *round_of_rows, "element"]


def test_sums_by_row_take_sixteen_bytes_a_row():
    case = Case(adamp, {"nesterov": True, "maximize": False, "clipped": True, "matrix": True}, ADAMP)
    assert max(case.rule.specialize(case.flags).row_buffer_of.values()) + 1 == 4


# roles that are stored in the last visit only

ROLES = ("param", "exp_avg", "exp_avg_sq")
DEFERRED = [
    Case(adamp, {"nesterov": nesterov, "maximize": False, "clipped": clipped, "matrix": True}, ADAMP)
    for nesterov, clipped in itertools.product((False, True), repeat=2)
]
EVERY = pytest.mark.parametrize("case", DEFERRED, ids=lambda c: c.id)
PLACES = pytest.mark.parametrize("place", [("cpu", "numba"), ("cpu", "eager")], ids=str)


@EVERY
@pytest.mark.parametrize("deferred", [ROLES, ("exp_avg",), ("exp_avg_sq",)], ids=str)
def test_only_the_last_stage_writes_deferred_roles(case, deferred):
    specialized = case.rule.specialize(case.flags, deferred=deferred)
    *others, last = specialized.stages
    assert set(last.writes) >= set(deferred)
    assert not any(set(stage.writes) & set(deferred) for stage in others)
    assert all(set(stage.reads) <= set(last.reads) for stage in others if stage.space == "element")
    for role in deferred:
        assert not any(f"_stored_{role}(" in function for stage in specialized.stages for function in stage.functions)
    assert specialized is case.rule.specialize(case.flags, deferred=set(deferred))


def test_nothing_is_deferred_unless_it_is_asked_for():
    flags = DEFERRED[0].flags
    assert adamp.specialize(flags, deferred=("grad", "param")) == adamp.specialize(flags)
    assert adamp.specialize(flags, deferred=ROLES) != adamp.specialize(flags)


@EVERY
@PLACES
def test_deferred_roles_are_those_of_the_rule_in_float64_and_rounded_once(case, place):
    """Low-precision moments do not blur the parameter, since it is computed from them before they are rounded."""
    (own,) = draw(case, [(40, 9)], [F32, F32, BF16, BF16], seed=5)
    (result,) = apply(case, [own], place, deferred=ROLES)
    scalars = {n: torch.tensor(float(v), dtype=F64) for n, v in case.rule.scalars(step=3.0, **case.options).items()}
    of_param = {name: ask for name, ask in PARAM_SCALARS.items() if name in case.rule.scalar_names}
    scalars |= {name: torch.tensor(float(ask(own["param"], F32)), dtype=F64) for name, ask in of_param.items()}
    expected = case.rule(**{r: t.double() for r, t in own.items()}, **scalars, **case.flags)
    for role, want in zip(case.rule.returned, expected, strict=True):
        rtol = 2e-6 if role == "param" else 2**-8
        torch.testing.assert_close(result[role].double(), want, rtol=rtol, atol=2e-6 if role == "param" else 0)
    assert torch.equal(result["grad"], own["grad"])


@EVERY
@PLACES
def test_where_storing_rounds_nothing_deferring_changes_no_bit(case, place):
    roles = draw(case, [(40, 9), (7,), (2, 8200), (3, 0)], [F64], seed=6)
    assert_same_bits(apply(case, roles, place), apply(case, roles, place, deferred=ROLES))
