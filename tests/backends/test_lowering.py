"""Does each backend compute the rule? Every backend against the rule in float64, and against each other to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import (
    BF16,
    CASES,
    DTYPES,
    EVERY_CASE,
    F16,
    F32,
    F64,
    MORE_CASES,
    PLACES,
    QUICK_PLACES,
    apply,
    apply_in_place,
    assert_rounded,
    assert_same_bits,
    assert_scaled_and_skipped,
    available,
    compute_of,
    draw,
    exact,
    pairwise,
)

OF_GRADIENTS = ("exp_avg", "grad_avg", "neg_pre_grad", "exp_avg_fast", "exp_avg_slow")  # states as large as these
SHAPES = [(), (1,), (5, 7), (0,), (2, 0, 3), (1023,), (4097,)]
BORDERS = sorted({n + d for n in (16, 64, 1024, 2048, 4096, 8192, 32768) for d in (-1, 0, 1)})


def check(case, place, dtypes, shapes=SHAPES, seed=0, scale=1.0):
    roles = draw(case, shapes, dtypes, seed)
    for own in roles:
        own["param"] *= scale
    results, expected, sizes = apply(case, roles, place), exact(case, roles), sizes_of_terms(case, roles)
    for before, result, want, terms in zip(roles, results, expected, sizes, strict=True):
        update = terms["param"]
        for role, value in want.items():
            size = torch.maximum(before[role].double().abs(), value.abs())
            if role in ("param", "ema_params"):
                size = torch.maximum(torch.maximum(size, before["param"].double().abs()), 2 * update)
            elif role in (
                "momentum_buffer",
                "acc_delta",
                "exp_avg_diff",
            ):  # what is added is as large, and has been rounded before
                size = 2 * (before[role].double().abs() + value.abs() + terms[role])
            else:  # a moment's errors go by its parts
                part = before["grad"].double().abs() + case.options["weight_decay"] * before["param"].double().abs()
                size = torch.maximum(size, part if role in OF_GRADIENTS else part * part)
            assert_rounded(result[role], value, size, compute_of(before), f"{case.id} {role}")
        assert torch.equal(result["grad"], before["grad"]), "the gradient is read, never written"


def sizes_of_terms(case, roles):
    """How large results would be if first moment and gradient did not cancel: what their rounding errors go by."""
    positive = [{r: t.abs() * (r != "param") for r, t in own.items()} for own in roles]
    for own in positive:
        own["grad"] = -own["grad"] if case.flags.get("maximize") else own["grad"]
    return [{role: value.abs() for role, value in own.items()} for own in exact(case, positive)]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda c: c.id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rule_and_flag_in_one_dtype(case, place, dtype):
    check(case, place, [dtype])


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda c: c.id)
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_parameters_that_are_zero_tiny_or_huge_beside_their_updates(case, place, scale):
    check(case, place, [F32], [(20000,)], scale=scale)


def combinations(case):
    return itertools.product(DTYPES, repeat=len(case.rule.specialize(case.flags).roles))


MIXED = [
    (case, dtypes)
    for case in (CASES[1], CASES[6], CASES[9])
    for dtypes in pairwise(*[DTYPES] * len(case.rule.specialize(case.flags).roles))
]
ALL = [(case, dtypes) for case in (CASES[1], CASES[6]) for dtypes in combinations(case)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", range(4))
def test_mixed_dtypes_pairwise(place, part):
    for case, dtypes in MIXED[part::4]:
        check(case, place, dtypes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("part", range(16))
def test_mixed_dtypes_all(place, part):
    for case, dtypes in ALL[part::16]:
        check(case, place, dtypes, [(), (37,), (4097,)])


@pytest.mark.parametrize(
    ("place", "dtypes"),
    [
        pytest.param(*place.values, dtypes, id=f"{place.id}-{dtypes}", marks=place.marks)
        for dtypes in ([F32], [BF16, F32, F16], [BF16], [F16], [F64])
        for place in (QUICK_PLACES if dtypes in ([BF16], [F64]) else PLACES)  # 16-bit tiles are others in Triton
    ],
)
def test_sizes_around_every_border(place, dtypes):
    """A tail that silently gets no update is a real bug that others had: every element, every size."""
    case, _ = MIXED[0]
    check(case, place, dtypes, [(n,) for n in BORDERS])


@pytest.mark.parametrize("place", PLACES)
def test_every_size_up_to_a_vector_and_some_beyond(place):
    check(CASES[1], place, [F32], [(n,) for n in range(1, 130)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_size_to_4097(place, dtype):
    sizes = range(1, 4098) if place[1] != "triton" or place[0] == "cuda" else range(1, 4098, 16)
    check(CASES[1], place, [dtype], [(n,) for n in sizes])


# All of a rule in float32; the other dtypes, whose loads and stores are the same for every rule, in turns.
SEVERAL = [[BF16], [F16], [F64], [F32, BF16, F16], [F64, BF16, F16], [BF16, F32]]
CASES_AND_DTYPES = [
    *((case, [[F32], SEVERAL[k % 3], SEVERAL[3 + k % 3]]) for k, case in enumerate(CASES)),
    *(pytest.param(case, [[F32], *SEVERAL], marks=pytest.mark.exhaustive) for case in (*CASES, *MORE_CASES)),
]


@pytest.mark.parametrize(
    ("case", "mixes"), CASES_AND_DTYPES, ids=lambda one: getattr(one, "id", None) or f"{len(one)} mixes"
)
def test_all_backends_give_the_same_bits(case, mixes):
    """Nothing is approximated or contracted anywhere, so a GPU and a CPU agree to the last bit."""
    for dtypes in mixes:
        roles = draw(case, SHAPES, dtypes, seed=1)
        first = apply(case, roles, available()[0])
        for place in available()[1:]:
            assert_same_bits(first, apply(case, roles, place), f"{place}, {dtypes}:")


@pytest.mark.parametrize("place", PLACES)
def test_unaligned_tensors(place):
    """An address is not aligned by right: slices of a buffer, as flattened models have them."""
    case = CASES[1]
    roles = draw(case, [(5000,), (3, 1700)], [F32])
    aligned = apply(case, roles, place)
    for shift in (1, 2, 3, 7):
        shifted = [{r: _shifted(t, shift, place[0]) for r, t in own.items()} for own in roles]
        apply_in_place(case, shifted, place)
        assert_same_bits(aligned, [{r: t.cpu() for r, t in own.items()} for own in shifted], f"shift {shift}")


def _shifted(tensor, shift, device):
    base = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=device)
    return base[shift:].copy_(tensor.flatten()).view(tensor.shape)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=str)
def test_grad_scale_and_found_inf(place, dtype):
    assert_scaled_and_skipped(CASES[1], draw(CASES[1], [(300,), (2049,)], [dtype]), place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_not_a_number_and_infinity_are_contagious_but_stay_where_they_are(place, dtype):
    case = CASES[5]  # with amsgrad: maximum must not drop a NaN
    roles = draw(case, [(4100,)], [dtype])
    bad = {1: float("nan"), 2: float("inf"), 2050: float("nan"), 4099: float("-inf")}
    for index, value in bad.items():
        roles[0]["grad"][index] = value
    (result,) = apply(case, roles, place)
    finite = torch.ones(4100, dtype=torch.bool)
    finite[list(bad)] = False
    assert not torch.isfinite(result["param"][~finite]).any()
    assert torch.isfinite(result["param"][finite]).all()
    assert torch.isnan(result["max_exp_avg_sq"][[1, 2050]]).all()


@pytest.mark.parametrize("place", PLACES)
def test_a_nan_with_a_full_mantissa_survives_rounding_to_bfloat16(place):
    """Rounding by integers could carry it over into minus zero."""
    case = CASES[1]
    roles = draw(case, [(64,)], [BF16, F32])
    roles[0]["grad"].view(torch.int32)[5] = 0x7FFFFFFF
    (result,) = apply(case, roles, place)
    assert torch.isnan(result["param"][5])
    assert torch.isfinite(result["param"][6:]).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.integers(0, 2**31))
def test_any_division_into_tensors_gives_the_same_bits(sizes, seed):
    """What an element becomes does not depend on the tensor, chunk or vector that it is in."""
    case = CASES[1]
    (whole,) = draw(case, [(sum(sizes),)], [F32], seed)
    pieces = [
        {r: t.clone() for r, t in zip(whole, parts, strict=True)}
        for parts in zip(*(t.split(sizes) for t in whole.values()), strict=True)
    ]
    (together,) = apply(case, [whole], ("cpu", "numba"))
    apart = apply(case, pieces, ("cpu", "numba"))
    for role in whole:
        assert torch.equal(together[role], torch.cat([own[role] for own in apart]))
