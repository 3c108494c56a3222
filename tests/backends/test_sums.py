"""Rules that sum: does every backend run their stages, add in the defined order, and give the same bits?"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedadam import backends
from fusedadam.engine.launch import Launches
from fusedadam.engine.member import Member
from fusedadam.rules.ops import group_sum, largest, row_sum, sqrt, tensor_sum, total, where
from fusedadam.rules.positions import START, Position
from fusedadam.rules.rule import Flag, Scalar, Value, Values, rule
from tests.support import (
    ALL_ADAMP,
    BF16,
    F16,
    F32,
    F64,
    PLACES,
    QUICK_PLACES,
    SUMMING,
    Case,
    apply,
    apply_in_place,
    assert_rounded,
    assert_same_bits,
    assert_scaled_and_skipped,
    available,
    draw,
    threads,
)

# rows of one and of nine, one row, one column, rows longer than a segment, nothing at all
SHAPES = [(), (1,), (7,), (5, 7), (40, 9), (70, 1), (1, 300), (6, 257), (2, 3, 3, 3), (0, 4), (3, 0), (2, 8200)]
SMALL = [(), (7,), (5, 7), (2, 257), (2, 3, 3, 3), (3, 0)]  # for the interpreter, which all shapes take seconds


INTERPRETED = [("cpu", "triton")]
# mixed dtypes with every third case, and with all of them in the exhaustive tests
MIXED = [BF16, F32, F16]
CASES_AND_DTYPES = [pytest.param(case, [F32], id=f"{case.id}-float32") for case in SUMMING] + [
    pytest.param(case, MIXED, id=f"{case.id}-mixed", marks=[pytest.mark.exhaustive] if k % 3 else [])
    for k, case in enumerate(SUMMING)
]


@pytest.mark.parametrize(("case", "dtypes"), CASES_AND_DTYPES)
def test_all_backends_give_the_same_bits(case, dtypes):
    if case.id == "clip-scaled":
        pytest.skip("any p: powers are not rounded correctly; see the next test")
    for shapes, places in (SHAPES, [p for p in available() if p not in INTERPRETED]), (SMALL, available()):
        roles = draw(case, shapes, dtypes, seed=1)
        first, *others = [apply(case, roles, place) for place in places]
        if not case.flags.get("infinite"):  # the largest is below the limit
            assert not torch.equal(first[3]["param"], roles[3]["param"])
        for place, other in zip(places[1:], others, strict=True):
            assert_same_bits(first, other, f"{place}, {dtypes}:")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton is tested there")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.exhaustive] if k % 9 else []) for k, c in enumerate(SUMMING)],
    ids=lambda c: c.id,
)  # fmt: skip
def test_the_interpreter_gives_the_same_bits_for_every_shape(case):
    if case.id == "clip-scaled":
        pytest.skip("any p: powers are not rounded correctly; see the next test")
    roles = draw(case, SHAPES, [F32], seed=1)
    assert_same_bits(apply(case, roles, ("cpu", "numba")), apply(case, roles, *INTERPRETED))


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [
        pytest.param(F32, 0, id="float32-aligned"),
        pytest.param(BF16, 1, id="bfloat16-unaligned"),
        pytest.param(F32, 1, id="float32-unaligned", marks=pytest.mark.exhaustive),
        pytest.param(BF16, 0, id="bfloat16-aligned", marks=pytest.mark.exhaustive),
    ],
)
def test_rows_that_fill_their_lanes(dtype, offset):
    """Triton has a kernel of its own for them, without masks, whatever the addresses."""
    roles = draw(ALL_ADAMP[0], [(3, 512), (2, 8448), (1, 256)], [dtype])
    results = []
    for place in available():
        moved = [{r: _moved(tensor.to(place[0]), offset) for r, tensor in each.items()} for each in roles]
        assert all((tensor.data_ptr() % 16 == 0) is not bool(offset) for each in moved for tensor in each.values())
        apply_in_place(ALL_ADAMP[0], moved, place)
        results.append([{r: tensor.cpu() for r, tensor in each.items()} for each in moved])
    for place, other in zip(available()[1:], results[1:], strict=True):
        assert_same_bits(results[0], other, f"{place}:")


def _moved(tensor, offset):
    """A copy whose address is as many elements behind an aligned one."""
    return torch.cat([tensor.new_zeros(offset), tensor.flatten()])[offset:].view(tensor.shape)


def test_more_rows_than_a_segment_of_them():
    """On the interpreter that takes seconds, so it is tried once; the next test tries all flags."""
    roles = draw(ALL_ADAMP[0], [(1100, 2), (5, 7)], [F32])
    first, *others = [apply(ALL_ADAMP[0], roles, place) for place in available()]
    for other in others:
        assert_same_bits(first, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL_ADAMP, ids=lambda c: c.id)
@pytest.mark.parametrize("dtypes", [[F32], [BF16], [F16], [F64], [BF16, F32, F16], [F32, BF16]], ids=str)
def test_every_flag_of_adamp_in_many_dtypes(case, dtypes):
    roles = draw(case, [*SHAPES, (1100, 2), (3, 20_000)], dtypes, seed=4)
    first, *others = [apply(case, roles, place) for place in available()]
    for other in others:
        assert_same_bits(first, other)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("case", SUMMING, ids=lambda c: c.id)
def test_float32_is_close_to_float64(case, place):
    """The parameter is within 2 ulps of max(|p|, 2 |u|), as docs/numerics.md promises."""
    roles = draw(case, SHAPES, [F32], seed=2)
    exact, sizes = in_float64(case, roles), sizes_of_updates(case, roles)
    for before, size, own, want in zip(roles, sizes, apply(case, roles, place), exact, strict=True):
        size = torch.maximum(before["param"].double().abs(), 2 * size)
        assert_rounded(own["param"], want["param"], size, F32, f"{case.id} {tuple(size.shape)}")
        for role, value in want.items():
            torch.testing.assert_close(
                own[role].double(), value, rtol=2e-6, atol=2e-6, msg=lambda m, r=role: f"{r}: {m}"
            )


def in_float64(case, roles):
    return apply(case, [{r: t.double() for r, t in own.items()} for own in roles], ("cpu", "eager"))


def sizes_of_updates(case, roles):
    """How large updates would be if first moment and gradient did not cancel; a projection mixes those of a row."""
    sign = -1 if case.flags.get("maximize") else 1
    positive = [{r: sign * t.abs() if r == "grad" else t.abs() for r, t in own.items()} for own in roles]
    for own, new in zip(positive, in_float64(case, positive), strict=True):
        size = (new["param"] - own["param"].double()).abs()
        is_by_row = case.rule.specialize(case.flags, own["param"]).by_rows and size.numel() and size.dim() > 1
        yield size.amax(tuple(range(1, size.dim())), keepdim=True).expand_as(size) if is_by_row else size


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", [SUMMING[0], SUMMING[3], SUMMING[-4]], ids=lambda c: c.id)
def test_float64_and_grad_scale_and_found_inf(case, place):
    if "grad" in case.rule.roles:
        assert_scaled_and_skipped(case, draw(case, [(5, 300), (40, 9), (7,)], [F64], seed=3), place)


def test_any_number_of_threads_gives_the_same_bits():
    case, shapes = SUMMING[1], [(700, 300), (1, 200_000), (50_000, 3)]
    roles = draw(case, shapes, [F32])
    one = apply(case, roles, ("cpu", "eager"))
    for count in (1, 2, 3, 8):
        with threads(count):
            assert_same_bits(one, apply(case, roles, ("cpu", "numba")), f"{count} threads:")


@rule(scalars=lambda step: {}, reports=("by_tensor", "by_group", "everything", "top"))
def every_sum(param: Value, grad: Value) -> Values:
    by_tensor, by_group, everything = tensor_sum(grad), group_sum(grad), total(grad)  # noqa: F841
    top = largest(grad)  # noqa: F841
    param = row_sum(grad)
    return param


@rule(scalars=lambda step: {}, reports=("by_tensor",))
def tensor_sums(param: Value, grad: Value) -> Values:
    by_tensor = tensor_sum(grad)  # noqa: F841
    return param


def run(one, grads, place, groups=None):
    roles = [{"param": torch.zeros_like(g).to(place[0]), "grad": g.to(place[0])} for g in grads]
    chosen = backends.choose(torch.device(place[0]), place[1])
    each = zip(roles, groups or [0] * len(grads), strict=True)
    launches = Launches([Member(one.specialize({}), chosen, own, group) for own, group in each])
    launches.set_scalars([{}], np.zeros(len(grads), dtype=np.int64))
    launches.execute(roles)
    return launches, roles


@pytest.mark.parametrize("place", PLACES)
def test_sums_by_row_tensor_group_and_over_all(place):
    generator = torch.Generator().manual_seed(0)
    shapes, dtypes, groups = [(3, 4), (5,), (2, 9000), (6, 2)], [F32, F32, BF16, F32], [0, 1, 1, 1]
    grads = [torch.rand(s, generator=generator).to(d) for s, d in zip(shapes, dtypes, strict=True)]
    launches, roles = run(every_sum, grads, place, groups)
    for own in roles:
        grad = own["grad"].cpu().double()
        rows = grad.sum(tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad
        torch.testing.assert_close(own["param"].cpu().double(), rows.expand_as(grad).to(own["param"].dtype).double())
    sizes = [g.double().sum().item() for g in grads]
    expected = {
        "by_tensor": sizes,
        "by_group": [sizes[0], sizes[1] + sizes[3], sizes[2], sizes[1] + sizes[3]],
        "everything": [sum(sizes)] * 4,
        "top": [max(g.max().item() for g in grads)] * 4,
    }
    for name, wanted in expected.items():
        found = {}
        for table, values in launches.report(name):
            found |= zip(table.member_indices.tolist(), values.tolist(), strict=True)
        assert [found[k] for k in range(4)] == pytest.approx(wanted, rel=1e-6), name


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20_000)), min_size=1, max_size=4), st.integers(0, 2**31))
def test_numba_adds_in_the_defined_order_whatever_the_shape(shapes, seed):
    grads = [torch.randn(s, generator=torch.Generator().manual_seed(seed)) for s in shapes]
    values = {}
    for backend in ("numba", "eager"):
        launches, roles = run(every_sum, grads, ("cpu", backend))
        values[backend] = [v for name in every_sum.reports for _, own in launches.report(name) for v in own.tolist()]
        values[backend] += [own["param"].flatten().tolist() for own in roles]
    assert values["numba"] == values["eager"]
    exact = [math.fsum(g.flatten().tolist()) for g in grads]
    sizes = [math.fsum(g.abs().flatten().tolist()) for g in grads]
    for found, wanted, size in zip(values["numba"], exact, sizes, strict=False):
        assert abs(found - wanted) <= 1e-6 * size


@pytest.mark.parametrize("place", PLACES)
def test_a_long_sum_stays_exact(place):
    """Added one after the other, a float32 sum of ones would stop at 2**24."""
    count = 2**24 + 2**13 if place[1] != "triton" or place[0] == "cuda" else 2**19 + 1
    launches, _ = run(tensor_sums, [torch.ones(count)], place)
    ((_, values),) = launches.report("by_tensor")
    assert values.tolist() == [count]


@rule(scalars=lambda step: {})
def needs_the_old(param: Value, grad: Value, state: Value, *, keep: Flag) -> Values:
    """What was in ``state`` before is needed after the sum: it must not be overwritten by then."""
    before = state
    state = state + grad
    norm = sqrt(tensor_sum(state * state))
    param = param - before / norm if keep else param - state / norm
    return param, state


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keep", [True, False])
def test_a_role_that_is_still_needed_is_stored_later(keep, place):
    case = Case(needs_the_old, {"keep": keep}, {})
    roles = draw(case, [(50,), (3, 9000)], [F32])
    for own, result in zip(roles, apply(case, roles, place), strict=True):
        p, g, s = (own[r].double() for r in ("param", "grad", "state"))
        norm = (s + g).square().sum().sqrt()
        torch.testing.assert_close(result["state"].double(), s + g)
        torch.testing.assert_close(result["param"].double(), p - (s if keep else s + g) / norm)
    stores = [stage.position for stage in needs_the_old.specialize({"keep": keep}).stages if "state" in stage.writes]
    assert stores == [Position(1) if keep else START]


@rule(scalars=lambda step: {})
def stored_in_between(param: Value, grad: Value, state: Value) -> Values:
    state = state + grad
    param = param + state - state * tensor_sum(state * 0.0)
    return param, state


@pytest.mark.parametrize("place", PLACES)
def test_what_is_stored_in_between_is_seen_as_stored_by_every_stage(place):
    case = Case(stored_in_between, {}, {})
    (own,) = draw(case, [(4, 30)], [F32, F32, BF16])
    (result,) = apply(case, [own], place)
    state = (own["state"].float() + own["grad"]).to(BF16)
    assert torch.equal(result["state"], state)
    assert torch.equal(result["param"], own["param"] + state.float())


def is_small(x, limit):
    return x < limit


@rule(scalars=lambda step: {"limit": 9.0})
def awkward(param: Value, grad: Value, *, limit: Scalar) -> Values:
    """Names that kernels use, conditions of helpers and where, values by row that are written and summed at once."""
    scalar = row_sum(param * param)
    table = sqrt(scalar) * limit
    update = sqrt(tensor_sum(scalar))
    small = is_small(row_sum(grad), limit)
    either = where(update > 1, update < 5, update > 7)
    param = where(small, param * table / update, param)
    param = where(either, param, -param)
    return param


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_an_awkward_rule_is_what_plain_python_makes_of_it(dtype, place):
    case = Case(awkward, {}, {})
    roles = draw(case, [(5, 7), (3, 300), (6,)], [dtype])
    for own, result in zip(roles, apply(case, roles, place), strict=True):
        plain = awkward(own["param"].double(), own["grad"].double(), limit=9.0)
        torch.testing.assert_close(result["param"].double(), plain, rtol=1e-5, atol=1e-6)
