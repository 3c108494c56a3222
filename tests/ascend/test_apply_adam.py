"""torch_npu's operators npu_apply_adam_w, npu_apply_adam and npu_bert_apply_adam, against the formulas by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fusedadam.ascend import (
    fused_ema_adamw,
    npu_apply_adam,
    npu_apply_adam_w,
    npu_apply_fused_adamw_v2,
    npu_apply_fused_ema_adamw,
    npu_bert_apply_adam,
)
from tests.support import BF16, F16, F32, assert_rounded

LOW = (F32, F16, BF16)
LR, BETA1, BETA2, EPS, DECAY = 0.1, 0.8, 0.95, 1e-3, 0.1


def drawn(dtype=F32, grad_dtype=None, seed=0):
    """var, m, v and a gradient; the second moment is one."""
    generator = torch.Generator().manual_seed(seed)
    var, m, v, grad = (torch.randn(3, 7, generator=generator) for _ in range(4))
    return [var.to(dtype), m.to(dtype), v.square().to(dtype), grad.to(grad_dtype or dtype)]


def moments(m, v, grad):
    return BETA1 * m + (1 - BETA1) * grad, BETA2 * v + (1 - BETA2) * grad * grad


def judge(out, before, expected, label=""):
    """Each result is the formula's, rounded once."""
    for tensor, old, value in zip(out, before, expected, strict=True):
        assert tensor.dtype == old.dtype
        size = 8 * torch.maximum(old.double().abs(), value.abs() + 10 * LR)
        assert_rounded(tensor.cpu(), value, size, F32, label)


def doubles(tensors):
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize(("dtype", "grad_dtype"), [(F32, F32), (F32, BF16), (F16, F32), (BF16, BF16)], ids=str)
def test_adam_w_multiplies_the_powers_of_the_step_before(dtype, grad_dtype, place):
    for step in (1, 3):
        for amsgrad, maximize in ((False, False), (True, True)):
            before = drawn(dtype, grad_dtype, seed=step)
            largest = before[2].float() + torch.linspace(-0.5, 0.5, 21).view(3, 7)
            var, m, v, grad = doubles(before)
            new_m, new_v = moments(m, v, -grad if maximize else grad)
            x = torch.maximum(largest.double(), new_v) if amsgrad else new_v
            denominator = (x / (1 - BETA2**step)).sqrt() + EPS
            new = var * (1 - LR * DECAY) - LR / (1 - BETA1**step) * new_m / denominator
            out, maximum = tuple(t.to(place[0], copy=True) for t in before[:3]), largest.to(place[0], copy=True)
            returned = npu_apply_adam_w(
                BETA1 ** (step - 1), BETA2 ** (step - 1), LR, DECAY, BETA1, BETA2, EPS, before[3].to(place[0]),
                maximum, amsgrad, maximize, out=out,
            )  # fmt: skip
            assert returned is out
            judge(out, before[:3], (new, new_m, new_v), f"step {step} amsgrad {amsgrad}")
            torch.testing.assert_close(maximum.cpu().double(), x if amsgrad else largest.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("dtype", "nesterov"), [(F32, False), (F32, True), (F16, False), (BF16, True)], ids=str)
def test_adam_is_tensorflows_with_the_powers_of_this_step(dtype, nesterov, place):
    for step in (1, 3):
        before = drawn(dtype, seed=step)
        var, m, v, grad = doubles(before)
        new_m, new_v = moments(m, v, grad)
        along = BETA1 * new_m + (1 - BETA1) * grad if nesterov else new_m
        rate = LR * math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
        new = var - rate * along / (new_v.sqrt() + EPS)
        out = tuple(t.to(place[0], copy=True) for t in before[:3])
        given = (BETA1**step, BETA2**step, LR, BETA1, BETA2, EPS, before[3].to(place[0]), False, nesterov)
        assert npu_apply_adam(*given, out=out) is out
        judge(out, before[:3], (new, new_m, new_v), f"step {step}")


BERT = {
    "no scaling": ({"max_grad_norm": -1.0, "global_grad_norm": 5.0}, 1.0),
    "a limit of 0": ({"max_grad_norm": 0.0, "global_grad_norm": 5.0}, 1.0),
    "scaled": ({"max_grad_norm": 2.0, "global_grad_norm": 5.0}, 2.5),
    "below the limit": ({"max_grad_norm": 10.0, "global_grad_norm": 5.0}, 1.0),
    "mBART's": ({"max_grad_norm": 2.0, "global_grad_norm": 5.0, "step_size": 0.03, "adam_mode": 1}, 1.0),
    "mBART's that stands still": (
        {"max_grad_norm": -1, "global_grad_norm": 0, "step_size": 0.0, "adam_mode": 1}, 1.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("case", BERT)
def test_bert_has_no_bias_correction_and_scales_by_a_norm_that_it_is_given(case, dtype, place):
    options, divisor = BERT[case]
    before = drawn(dtype)
    var, m, v, grad = doubles(before)
    new_m, new_v = moments(m, v, grad / divisor)
    update = new_m / (new_v.sqrt() + EPS)
    if options.get("adam_mode"):
        new = var - (options["step_size"] * update + LR * DECAY * var)
    else:
        new = var - LR * (update + DECAY * var)
    out, own = tuple(t.to(place[0], copy=True) for t in before[:3]), before[3].to(place[0], copy=True)
    returned = npu_bert_apply_adam(LR, BETA1, BETA2, EPS, own, weight_decay=DECAY, **options, out=out)
    assert returned is out
    judge(out, before[:3], (new, new_m, new_v), case)
    assert torch.equal(own.cpu(), before[3]), "the gradient is only read"


def test_numbers_may_be_tensors_and_out_a_list():
    """As in torch_npu's own tests; without amsgrad a maximum of any shape is not looked at."""
    one, other = drawn(), drawn()
    numbers = (BETA1, BETA2, LR, DECAY, BETA1, BETA2, EPS)
    npu_apply_adam_w(*numbers, one[3], out=tuple(one[:3]))
    out = other[:3]
    given = [torch.tensor([number], dtype=torch.float64) for number in numbers]
    assert npu_apply_adam_w(*given, other[3], torch.tensor(1.0), False, False, out=out) is out
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_empty_tensor_is_updated_without_complaint():
    out = tuple(torch.zeros(0, 4) for _ in range(3))
    assert npu_apply_adam_w(1, 1, LR, DECAY, BETA1, BETA2, EPS, torch.zeros(0, 4), out=out) is out


# both spellings of MindSpeed's operator

PAGES = ("var", "grad", "m", "v", "max_grad_norm", "step")
MINDSPEEDS = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state_step")


def values(seed=0):
    var, m, v, grad = drawn(seed=seed)
    return var, grad, m, v, v.clone(), torch.tensor([2])


@pytest.mark.parametrize("positional", range(7))
@pytest.mark.parametrize("names", [PAGES, MINDSPEEDS], ids=["the page's", "MindSpeed's"])
def test_both_spellings_by_position_and_keyword(names, positional):
    expected, own = values(), values()
    npu_apply_fused_adamw_v2(*expected, amsgrad=True)
    by_keyword = dict(zip(names[positional:], own[positional:], strict=True))
    assert npu_apply_fused_adamw_v2(*own[:positional], **by_keyword, amsgrad=True) is None
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


MIXED = [
    (0, ("param", "grad", "m", "exp_avg_sq", "max_exp_avg_sq", "state_step"), ("m", "param")),
    (0, ("var", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state_step"), ("var", "exp_avg")),
    (0, (*MINDSPEEDS[:5], "step"), ("step", "param")),
    (0, (*MINDSPEEDS, "var"), ("param", "var")),
    (2, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "state_step", "param"), ("param", "var")),
    (6, ("state_step",), ("state_step", "step")),
]


@pytest.mark.parametrize(("positional", "names", "named"), MIXED, ids=str)
def test_spellings_that_are_mixed_or_repeated_are_refused_by_name(positional, names, named):
    own, before = values(), values()
    by_name = dict(zip((*PAGES, *MINDSPEEDS), (*own, *own), strict=True))
    with pytest.raises(TypeError) as refused:
        npu_apply_fused_adamw_v2(*own[:positional], **{name: by_name[name] for name in names})
    assert all(f"{name} " in str(refused.value) for name in named), refused.value
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))


def test_errors_have_the_names_of_the_callers_spelling():
    own = dict(zip(MINDSPEEDS, values(), strict=True))
    with pytest.raises(RuntimeError, match=r"^exp_avg has shape \(2,\), but its param has"):
        npu_apply_fused_adamw_v2(**own | {"exp_avg": torch.ones(2)})
    with pytest.raises(ValueError, match=r"^max_exp_avg_sq is None"):
        npu_apply_fused_adamw_v2(**own | {"max_exp_avg_sq": None}, amsgrad=True)


# MindSpeed's function over lists

EMA = (0.1, 0.9, 0.8, 0.95, 1e-3, 1, True, 0.1)


def lists():
    each = [(*drawn(dtype, seed=seed), torch.full((3, 7), 0.5, dtype=dtype)) for seed, dtype in enumerate(LOW)]
    var, m, v, grad, s = ([tensors[k] for tensors in each] for k in range(5))
    return grad, var, m, v, s


def test_lists_are_the_operator_for_each_of_their_tensors():
    own, expected = lists(), lists()
    assert fused_ema_adamw(*own, torch.tensor([3]), *EMA) is None
    for tensors in zip(*expected, strict=True):
        npu_apply_fused_ema_adamw(*tensors, 3, *EMA)
    assert all(torch.equal(a, b) for x, y in zip(own, expected, strict=True) for a, b in zip(x, y, strict=True))
    fused_ema_adamw([], [], [], [], [], torch.tensor([1]), *EMA)


def test_lists_that_do_not_fit_are_refused_by_name():
    grad, var, m, v, s = lists()
    before = [t.clone() for t in (*var, *m, *v, *s)]
    with pytest.raises(ValueError, match=r"^m must be what var is: .* a list of 3"):
        fused_ema_adamw(grad, var, m[:2], v, s, 1, *EMA)
    with pytest.raises(TypeError, match=r"^grad is a Tensor; it must be a list of tensors"):
        fused_ema_adamw(grad[0], var, m, v, s, 1, *EMA)
    with pytest.raises(RuntimeError, match=r"s has shape"):
        fused_ema_adamw(grad, var, m, v, [*s[:2], torch.ones(2)], 1, *EMA)
    with pytest.raises(ValueError, match="mode"):
        fused_ema_adamw(grad, var, m, v, s, 1, *EMA[:5], 2, True, 0.1)
    assert all(torch.equal(a, b) for a, b in zip((*var, *m, *v, *s), before, strict=True))
