"""Clipping by the global norm, fused into the step and on its own, against torch.nn.utils.clip_grad_norm_."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_

import fusedadam
from tests.meaning.by_hand import clipped, norm_by_hand
from tests.support import BF16, F16, F32, F64, QUICK_PLACES, ulp

pytestmark = [
    pytest.mark.filterwarnings("error"),  # clipping nothing, or what is not finite, is no reason to warn
    # but numpy may, under Triton's interpreter, about lanes that nobody uses
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

OPTIMIZERS = [
    (fusedadam.AdamW, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (fusedadam.Adam, {"weight_decay": 0.1}),
    (fusedadam.EmaAdamW, {"weight_decay": 0.1}),
    (fusedadam.AdamP, {"weight_decay": 0.1, "nesterov": True}),
]
EVERY = pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", ""))
SHAPES = [(7, 5), (300,), (), (3, 4, 2, 2), (0, 3)]
DTYPES = [(F64,), (F32,), (F64, F32), (BF16, F32, F16)]


def parameters(dtypes=(F64,), device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator) for s in shapes]
    return [torch.nn.Parameter(v.to(device, dtypes[k % len(dtypes)])) for k, v in enumerate(values)]


def set_gradients(params, step=0, missing=()):
    generator = torch.Generator().manual_seed(100 + step)
    for k, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p)
        p.grad = None if k in missing else grad


def gradients(params):
    return [p.grad for p in params if p.grad is not None]


def in_two_groups(params):
    return [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 3e-3}]


def tolerance(*dtypes):
    """What two ways to sum squares and to round a product may differ by."""
    return max({F64: 1e-12, F32: 2e-6, BF16: 2e-2, F16: 2e-3}[d] for d in dtypes)


@EVERY
@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("dtypes", DTYPES[:3], ids=str)
def test_a_clipped_step_is_a_clip_and_a_step(cls, options, dtypes, place):
    """Above the norm, below it and around it; some parameters without gradients now and then."""
    device, backend = place
    ours, theirs = parameters(dtypes, device), parameters(dtypes, device)
    fused = cls(in_two_groups(ours), max_grad_norm=15.0, backend=backend, **options)
    plain = cls(in_two_groups(theirs), backend=backend, **options)
    near = {"rtol": tolerance(*dtypes), "atol": tolerance(*dtypes) / 10}
    above = []
    for step in range(9):
        for params in (ours, theirs):
            set_gradients(params, step, missing={step % 3, 4})
        before = [g.clone() for g in gradients(ours)]
        norm = torchs_clip_grad_norm_(theirs, 15.0)
        fused.step()
        plain.step()
        above.append(bool(norm > 15))
        assert all(torch.equal(a, b) for a, b in zip(before, gradients(ours), strict=True))
        assert isinstance(fused.grad_norm, torch.Tensor)
        assert fused.grad_norm.shape == ()
        assert fused.grad_norm.item() == pytest.approx(norm_by_hand(before), rel=tolerance(*dtypes))
    assert set(above) == {True, False}
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **near)
        for name, value in plain.state[q].items():
            torch.testing.assert_close(fused.state[p][name], value, **near)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("cls", [cls for cls, _ in OPTIMIZERS])
def test_low_precision_is_summed_and_scaled_in_float32(cls, place):
    """The scaled gradient is nowhere rounded: a first step of Adam stores (1 - beta1) times it, to half an ulp."""
    device, backend = place
    params = parameters((BF16, F32, F16), device)
    set_gradients(params)
    optimizer = cls(params, weight_decay=0.0, max_grad_norm=1.0, backend=backend)
    optimizer.step()
    grads = [g.cpu() for g in gradients(params)]
    assert optimizer.grad_norm.item() == pytest.approx(norm_by_hand(grads), rel=1e-6)
    for p, grad in zip(params, clipped(grads, 1.0), strict=True):
        error = (optimizer.state[p]["exp_avg"].cpu().double() - 0.1 * grad).abs()
        assert (error <= 0.5 * ulp(0.1 * grad, p.dtype) + 1e-6 * grad.abs()).all()


@EVERY
def test_a_group_without_a_norm_neither_counts_nor_is_clipped(cls, options):
    ours, theirs = parameters(), parameters()
    norms = [0.5, None, 2.0]
    parts = [slice(0, 2), slice(2, 3), slice(3, 5)]
    groups = [{"params": ours[part], "max_grad_norm": norm} for part, norm in zip(parts, norms, strict=True)]
    fused, plain = cls(groups, **options), cls([{"params": theirs[part]} for part in parts], **options)
    for step in range(3):
        set_gradients(ours, step)
        counted = gradients(ours[:2] + ours[3:])
        for part, norm in zip(parts, norms, strict=True):
            for p, q in zip(ours[part], theirs[part], strict=True):
                q.grad = p.grad.clone() if norm is None else clipped([p.grad], norm, norm_by_hand(counted))[0]
        fused.step()
        plain.step()
        assert fused.grad_norm.item() == pytest.approx(norm_by_hand(counted), rel=1e-12)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gradients_that_are_not_finite_do_what_they_do_with_torch(bad, place):
    """An infinite norm makes finite gradients 0 and infinite ones NaN; a norm of NaN makes everything NaN."""
    device, backend = place
    ours, theirs, ours_alone = (parameters((F64, F32), device) for _ in range(3))
    for params in (ours, theirs, ours_alone):
        set_gradients(params)
        params[1].grad[3] = bad
    fused = fusedadam.AdamW(ours, max_grad_norm=1.0, backend=backend)
    plain = torch.optim.AdamW(theirs, foreach=False)
    norms = torchs_clip_grad_norm_(theirs, 1.0), fusedadam.clip_grad_norm_(ours_alone, 1.0)
    fused.step()
    plain.step()
    for norm in (*norms, fused.grad_norm):
        assert norm.isnan() if math.isnan(bad) else norm == math.inf
    for p, q, alone in zip(ours, theirs, ours_alone, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(alone.grad, q.grad, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(fused.state[p]["exp_avg"], plain.state[q]["exp_avg"], equal_nan=True)


NORMS = [1.0, 2.0, 0.5, 3.0, math.inf]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtypes", [*DTYPES, (BF16,), (F16,)], ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
def test_clip_grad_norm_is_torchs(norm_type, dtypes, device):
    shapes = [(7, 5), (60,), (), (3, 4, 2, 2), (0, 3)]  # few enough for a norm of 1/2 in float16
    for part in (0.01, 0.999, 1.5):  # of the norm
        ours, theirs = (parameters(dtypes, device, shapes) for _ in range(2))
        for params in (ours, theirs):
            set_gradients(params, missing={3})
        before = [None if p.grad is None else p.grad.to("cpu", F64, copy=True) for p in ours]
        exact = torch.linalg.vector_norm(torch.cat([g.flatten() for g in before if g is not None]), norm_type).item()
        near = tolerance(*dtypes)
        expected = torchs_clip_grad_norm_([p for p in theirs if p.numel()], part * exact, norm_type)
        norm = fusedadam.clip_grad_norm_(ours, part * exact, norm_type)
        assert isinstance(norm, torch.Tensor)
        assert norm.shape == ()
        assert norm.device == expected.device
        assert norm.item() == pytest.approx(exact, rel=near)
        for p, q, grad in zip(ours, theirs, before, strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=near, atol=near / 10)
            if grad is not None:
                grad *= min(1, part * exact / (exact + 1e-6))
                error = (p.grad.cpu().double() - grad).abs()
                assert (error <= ulp(grad, p.dtype) + tolerance(F64 if dtypes == (F64,) else F32) * grad.abs()).all()


HOW = {
    "a list": lambda params: params,
    "a tuple": tuple,
    "a generator": iter,
    "one tensor": lambda params: params[0],
    "none at all": lambda params: [],
    "none with a gradient": lambda params: params[4:],
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("norm_type", [2, "inf"])  # torch takes both
def test_what_clip_grad_norm_takes(how, norm_type):
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        set_gradients(params, missing={4})
    results = [
        clip(HOW[how](params), 0.5, norm_type)
        for clip, params in ((fusedadam.clip_grad_norm_, ours), (torchs_clip_grad_norm_, theirs))
    ]
    torch.testing.assert_close(*results, check_dtype=False, rtol=1e-12, atol=0)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_error_if_nonfinite_raises_before_any_gradient_is_changed(bad):
    params = parameters((F32, F64))
    set_gradients(params)
    params[3].grad[0] = bad
    before = [g.clone() for g in gradients(params)]
    with pytest.raises(RuntimeError, match="finite"):
        fusedadam.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    torch.testing.assert_close(gradients(params), before, rtol=0, atol=0, equal_nan=True)


LAYOUTS = {
    "transposed": lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda g: torch.stack([g, g], dim=-1)[..., 0],
    "channels last": lambda g: g.contiguous(memory_format=torch.channels_last),
    "part of a row": lambda g: torch.cat([g, 100 + g], dim=-1)[..., : g.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_that_do_not_lie_plainly(layout):
    ours, theirs = parameters(shapes=[(3, 4, 2, 5)] * 2), parameters(shapes=[(3, 4, 2, 5)] * 2)
    for params in (ours, theirs):
        set_gradients(params)
    laid = LAYOUTS[layout](ours[0].grad)
    ours[0].grad = laid
    norm = fusedadam.clip_grad_norm_(ours, 1.0)
    torch.testing.assert_close(norm, torchs_clip_grad_norm_(theirs, 1.0), rtol=1e-12, atol=0)
    assert ours[0].grad is laid
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
    if layout == "part of a row":
        assert (laid._base[..., 5:] > 50).all()  # what lies between is not touched


# a power of anything smaller may be 0, here as in torch's norms over several tensors
NUMBERS = st.floats(-1e3, 1e3).map(lambda x: x if abs(x) > 1e-40 else 0.0)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.lists(NUMBERS, min_size=1, max_size=9), min_size=1, max_size=5),
    norm_type=st.sampled_from([1, 2, math.inf]) | st.floats(0.5, 6),
    max_norm=st.floats(0, 1e4),
)
def test_any_gradients_any_norm(values, norm_type, max_norm):
    ours, theirs = ([torch.nn.Parameter(torch.zeros(len(v), dtype=F64)) for v in values] for _ in range(2))
    for params in (ours, theirs):
        for p, value in zip(params, values, strict=True):
            p.grad = torch.tensor(value, dtype=F64)
    norm = fusedadam.clip_grad_norm_(ours, max_norm, norm_type)
    torch.testing.assert_close(norm, torchs_clip_grad_norm_(theirs, max_norm, norm_type), rtol=1e-10, atol=1e-300)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-300)
