"""MindSpeed's operators, against the formulas of their pages written out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fusedadam import functional
from fusedadam.ascend import npu_apply_fused_adamw_v2, npu_apply_fused_ema_adamw
from fusedadam.optimizers.adamw import adam
from fusedadam.optimizers.ema_adamw import ema_adam
from tests.meaning.by_hand import EmaAdamByHand, adamw_v2_listing
from tests.meaning.judge import judge
from tests.support import BF16, F16, F32, Case, assert_rounded, assert_same_bits, draw, ulp

LOW = (F32, F16, BF16)
FLAGS = list(itertools.product((False, True), repeat=2))
# none of them is a float32 number, and all of them matter: eps, too
ATTRIBUTES = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-3}
NO_FLAGS = {"amsgrad": False, "maximize": False}
ADAMW = Case(adam, {**dict.fromkeys(adam.flags, False), "amsgrad": True}, {})
EMA = Case(ema_adam, dict.fromkeys(ema_adam.flags, False), {})
ROLES = ("var", "grad", "m", "v", "max_grad_norm")
EMA_ROLES = ("var", "grad", "m", "v", "s")


def drawn(case, dtypes=(F32,), shape=(3, 7), seed=0):
    """Tensors by the names of the page."""
    names = ROLES if case is ADAMW else EMA_ROLES
    return dict(zip(names, draw(case, [shape], dtypes, seed)[0].values(), strict=True))


def on(device, tensors):
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def steps(place):
    return (1,) if place == ("cpu", "triton") else (1, 2, 3)  # Triton's interpreter is slow


def assert_within_two_ulps(result, expected, size, label):
    assert result.dtype == expected.dtype
    error = (result.cpu().double() - expected.double()).abs()
    assert (error <= 2 * ulp(size, expected.dtype)).all(), (label, (error / ulp(size, expected.dtype)).max().item())


def larger(a, b):
    return torch.maximum(a.double().abs(), b.double().abs())


@pytest.mark.parametrize(("var", "grad", "largest"), list(itertools.product(LOW, LOW, LOW)), ids=lambda d: str(d)[6:])
def test_every_combination_of_dtypes_is_what_the_page_lists(var, grad, largest, place):
    """Each step is judged from what ours has stored: a rounding to bfloat16 that falls the other way is one ulp then,
    and not a hundred some steps later."""
    device, dtypes = place[0], (var, grad, var, var, largest)
    for amsgrad, maximize in FLAGS:
        flags = {"amsgrad": amsgrad, "maximize": maximize}
        before = drawn(ADAMW, dtypes)
        for step in steps(place):
            mine = on(device, before)
            new = adamw_v2_listing(**before, step=step, **flags, **ATTRIBUTES)
            expected = dict(zip(("var", "m", "v", "max_grad_norm"), new, strict=True))
            number = torch.tensor([step], device=device)
            assert npu_apply_fused_adamw_v2(**mine, step=number, **flags, **ATTRIBUTES) is None
            sizes = {
                "var": larger(before["var"], expected["var"].double() - before["var"].double()),
                "m": larger(before["m"], before["grad"]),
            }
            for name, value in expected.items():
                assert_within_two_ulps(mine[name], value, sizes.get(name, value), (name, step, flags))
            untouched = ("grad",) if amsgrad else ("grad", "max_grad_norm")
            assert all(torch.equal(mine[name].cpu(), before[name]) for name in untouched)
            before = {**on("cpu", mine), "grad": drawn(ADAMW, dtypes, seed=step)["grad"]}


def pages_example():
    return {name: torch.full((10, 10), value) for name, value in zip(ROLES, (0.5, 0.5, 0.9, 0.9, 0.9), strict=True)}


def test_the_pages_example_gives_the_formulas_value(device):
    """The formula in numbers, with 0.9999 as float32 has it; no tensor and no line of ours takes part."""
    mine = on(device, pages_example())
    step = torch.full((1,), 1).to(torch.int64).to(device)
    npu_apply_fused_adamw_v2(*mine.values(), step, 1e-3, 0.9999, 0.9999, 0.0, 1e-8, False, False)
    beta, lr, eps, start = (float(np.float32(value)) for value in (0.9999, 1e-3, 1e-8, 0.9))
    m, v = start + (1 - beta) * (0.5 - start), beta * start + (1 - beta) * 0.5 * 0.5
    var = 0.5 - lr / (1 - beta) * m / (math.sqrt(v) / math.sqrt(1 - beta) + eps)
    assert var == pytest.approx(0.40514, abs=1e-6)
    for name, value in {"var": var, "m": m, "v": v, "max_grad_norm": start}.items():
        expected = torch.full((10, 10), value, dtype=torch.float64)
        assert_rounded(mine[name].cpu(), expected, expected, F32, name)


def test_the_attributes_are_rounded_to_float32_which_our_own_operator_does_not_do():
    """At 0.9999 that moves the very first step by many ulps."""
    theirs, same, ours = (list(pages_example().values()) for _ in range(3))
    betas = {"beta1": 0.9999, "beta2": 0.9999}
    npu_apply_fused_adamw_v2(*theirs, 1, **betas)
    rounded = {name: float(np.float32(value)) for name, value in {**betas, "lr": 1e-3, "eps": 1e-8}.items()}
    functional.adamw_(*same, step=1, **rounded)
    functional.adamw_(*ours, step=1, **betas)
    assert all(torch.equal(a, b) for a, b in zip(theirs, same, strict=True))
    assert ((theirs[0].double() - ours[0].double()).abs() > 10 * ulp(theirs[0], F32)).all()


@pytest.mark.parametrize("operator", [npu_apply_fused_adamw_v2, npu_apply_fused_ema_adamw], ids=lambda f: f.__name__)
def test_the_step_may_be_a_tensor_of_either_shape_or_an_int(operator):
    case = ADAMW if operator is npu_apply_fused_adamw_v2 else EMA
    results = [drawn(case) for _ in range(5)]
    for own, step in zip(results, (torch.tensor([4]), torch.tensor(4), 4, np.int64(4), 3), strict=True):
        operator(**own, step=step)
    assert_same_bits(results[1:4], results[:1] * 3)
    assert not torch.equal(results[4]["var"], results[0]["var"])


@pytest.mark.parametrize("given", [True, False], ids=["a tensor", "None"])
def test_without_amsgrad_the_maximum_is_not_touched_and_may_be_missing(given, device):
    mine = on(device, drawn(ADAMW, LOW))
    mine["m"], mine["v"] = mine["m"].float(), mine["v"].float()
    largest = mine.pop("max_grad_norm")
    version, before = largest._version, largest.clone()
    expected = adamw_v2_listing(**on("cpu", mine), max_grad_norm=before.cpu(), step=1, **ATTRIBUTES, **NO_FLAGS)
    npu_apply_fused_adamw_v2(**mine, max_grad_norm=largest if given else None, step=1, **ATTRIBUTES)
    assert torch.equal(largest, before)
    assert largest._version == version
    assert_within_two_ulps(mine["var"], expected[0], expected[0], "var")


def test_a_maximum_that_is_not_used_may_lie_anywhere():
    plain, expanded, shared = drawn(ADAMW), drawn(ADAMW), drawn(ADAMW)
    expanded["max_grad_norm"] = torch.zeros(1).expand(3, 7)
    shared["max_grad_norm"] = shared["v"]
    for own in (plain, expanded, shared):
        npu_apply_fused_adamw_v2(**own, step=1)
        del own["max_grad_norm"]
    assert_same_bits([expanded, shared], [plain] * 2)


def with_gaps(t):
    return torch.stack([t, torch.full_like(t, 7.0)], dim=-1)[..., 0]


def transposed(t):
    return t.t().contiguous().t()


LAYOUTS = {  # and a shape
    "with gaps": (with_gaps, (4, 5)),
    "transposed": (transposed, (4, 5)),
    "0-d": (torch.clone, ()),
    "empty": (torch.clone, (0, 3)),
    "one dimension": (torch.clone, (20,)),
    "five dimensions": (torch.clone, (2, 1, 3, 1, 2)),
}


@pytest.mark.parametrize("case", [ADAMW, EMA], ids=lambda case: case.rule.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_shape_and_any_layout_gives_the_same_bits(layout, case, device):
    """Also mixed: every second tensor lies as the layout says, the others plainly."""
    operator, flags = (
        (npu_apply_fused_adamw_v2, {"amsgrad": True}) if case is ADAMW else (npu_apply_fused_ema_adamw, {})
    )
    lay, shape = LAYOUTS[layout]
    flat = {name: t.reshape(-1) for name, t in on(device, drawn(case, shape=shape)).items()}
    all_so = {name: lay(t.reshape(shape)) for name, t in flat.items()}
    every_second = {name: (lay if k % 2 else torch.clone)(t.reshape(shape)) for k, (name, t) in enumerate(flat.items())}
    before = flat["var"].clone()
    for own in (all_so, every_second, flat):
        operator(**own, step=2, weight_decay=0.1, **flags)
    plain = [{name: t.reshape(-1) for name, t in own.items()} for own in (all_so, every_second)]
    assert_same_bits(plain, [flat] * 2, layout)
    assert not flat["var"].numel() or not torch.equal(flat["var"], before)
    if lay is with_gaps:
        between = [t.as_strided(shape, t.stride(), t.storage_offset() + 1) for t in all_so.values()]
        assert all((gap == 7).all() for gap in between)


def test_a_gradient_may_be_expanded():
    one, other = drawn(ADAMW), drawn(ADAMW)
    one["grad"] = one["grad"][:1].expand(3, 7)
    other["grad"] = one["grad"].contiguous()
    for own in (one, other):
        npu_apply_fused_adamw_v2(**own, step=1)
    assert_same_bits([one], [other])


def test_parameters_that_need_gradients_are_updated_in_place_and_autograd_notices():
    var = torch.nn.Parameter(torch.ones(3))
    loss = (var**2).sum()
    npu_apply_fused_adamw_v2(var, torch.ones(3), torch.zeros(3), torch.zeros(3), None, 1)
    assert var.requires_grad
    assert var.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("mode", "bias_correction"), list(itertools.product((0, 1), (True, False))))
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_averaging_operator_equals_the_formula_and_returns_what_it_was_given(dtype, mode, bias_correction, place):
    options = {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1, "ema_decay": 0.9}
    start = drawn(EMA, (dtype,))
    by_hand = EmaAdamByHand(
        start["var"].double(), betas=(0.8, 0.95), mode=mode, bias_correction=bias_correction, **options
    )
    by_hand.m, by_hand.v, by_hand.s = (start[name].double() for name in "mvs")
    device, mine = place[0], on(place[0], start)
    options |= {"beta1": 0.8, "beta2": 0.95, "mode": mode, "bias_correction": bias_correction}
    for step in steps(place):
        mine["grad"] = drawn(EMA, (dtype,), seed=step)["grad"].to(device)
        returned = npu_apply_fused_ema_adamw(**mine, step=torch.tensor([step], device=device), **options)
        assert len(returned) == 4
        assert all(result is mine[name] for result, name in zip(returned, ("var", "m", "v", "s"), strict=True))
        state = {"step": step, "exp_avg": mine["m"], "exp_avg_sq": mine["v"]}
        judge(by_hand, mine["var"], state, mine["grad"], f"step {step}")
        average = mine["s"].cpu()
        assert_rounded(average, by_hand.s, 4 * larger(by_hand.p, by_hand.s), F32, f"step {step}, s")
        by_hand.s = average.double()


@pytest.mark.parametrize("missing", ["exp_avg_sq", "state_step", "max_exp_avg_sq"])
def test_what_is_missing_has_the_callers_name(missing):
    tensors = {name: torch.ones(2) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    given = {**tensors, "state_step": torch.tensor([1])}
    del given[missing]
    with pytest.raises(TypeError, match=f"missing a required argument: '{missing}'"):
        npu_apply_fused_adamw_v2(**given)
    assert torch.equal(tensors["param"], torch.ones(2))
