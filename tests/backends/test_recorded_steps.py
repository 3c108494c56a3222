"""Results are, to the bit, what they were when recorded_steps.json was written, on every backend."""

import json

import pytest

from tests.backends import recorded_steps
from tests.support import CASES, QUICK_PLACES, SUMMING

QUICK = ("f32", "bf16 params, f32 states")
RECORDED = json.loads(recorded_steps.RECORD.read_text("utf-8"))


def steps():
    """Rules that sum take Numba long to compile, and the quick tests ask it about one mix of them."""
    for case in (*CASES, *SUMMING):
        for mix in recorded_steps.MIXES:
            for place in QUICK_PLACES:
                slow = mix not in QUICK or (mix != "f32" and case in SUMMING and place.id == "cpu-numba")
                marks = [*place.marks, *([pytest.mark.exhaustive] if slow else [])]
                yield pytest.param(case, mix, *place.values, id=f"{case.id}-{mix}-{place.id}", marks=marks)


@pytest.mark.parametrize(("case", "mix", "place"), steps())
def test_one_step_of_a_rule(case, mix, place):
    if case.id == "clip-scaled" and place[1] == "triton":
        pytest.skip("a norm of order 3 takes powers, which each math library rounds in its own way")
    found = recorded_steps.one_step(case, recorded_steps.MIXES[mix], place)
    assert found == RECORDED[f"{case.id} / {mix}"]


@pytest.mark.parametrize("place", QUICK_PLACES)
def test_five_steps_of_each_optimizer(place):
    assert {name: RECORDED[name] == own for name, own in recorded_steps.by_optimizer(place)} == {
        f"{name} / {dtype}": True for name in recorded_steps.OPTIMIZERS for dtype in ("torch.float32", "torch.bfloat16")
    }
