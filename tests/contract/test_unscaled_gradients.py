"""After ``GradScaler.step`` gradients are unscaled, as torch's fused optimizers leave them."""

from __future__ import annotations

import math

import pytest
import torch

import fusedadam
from tests.contract.common import EVERY, MAKERS, assert_same, assert_unchanged, everything, leaves, params_of, set_grads
from tests.contract.test_amp_on_cpu import scaler_of, set_scaled_grads
from tests.support import BF16, F16, F32, F64, PLACES

SCALE = 8.0


def scaled(optimizer, scale=SCALE, found_inf=0.0, device="cpu"):
    """One step with what a GradScaler hands over."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale, device=device)
    optimizer.found_inf = torch.tensor(found_inf, device=device)
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def grads_of(optimizer):
    return [p.grad for p in params_of(optimizer)]


def unscaled_by_hand(optimizer, scale=SCALE):
    """Divided as the step computes: in float64 for float64 parameters, else in float32."""
    wide = {True: F64, False: F32}
    return [(p.grad.to(wide[p.dtype == F64]) / scale).to(p.grad.dtype) for p in params_of(optimizer)]


def assert_unscaled(optimizer, step, scale=SCALE, device="cpu"):
    set_grads(params_of(optimizer), step)
    expected = unscaled_by_hand(optimizer, scale)
    scaled(optimizer, scale, device=device)
    assert_same(grads_of(optimizer), expected)


@EVERY
@pytest.mark.parametrize("dtypes", [(F32,), (F16, BF16), (F64, F32)], ids=str)
def test_gradients_are_divided_by_the_scale(make, dtypes):
    """In the first step, in later ones, and with a scale that is no power of two. Other dtypes through the backend that
    compiles nothing."""
    optimizer = make(leaves(dtypes=dtypes), backend="numba" if dtypes == (F32,) else "eager")
    for step, scale in enumerate((SCALE, SCALE, 3.0)):
        assert_unscaled(optimizer, step, scale)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["AdamW", "AdamW clipped", "AdamP", "AdamP clipped", "BertAdam"])
def test_on_every_backend(place, name):
    device, backend = place
    dtypes = (F32, BF16) if device == "cpu" else (F32, BF16, F16)
    optimizer = MAKERS[name](leaves([(3, 300), (1030,), (5, 4)], dtypes, device=device), backend=backend)
    for step in range(2):
        assert_unscaled(optimizer, step, device=device)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_they_are_what_torchs_fused_optimizer_leaves(name, dtype):
    results = []
    for owner, options in ((fusedadam, {}), (torch.optim, {"fused": True})):
        optimizer, scaler = getattr(owner, name)(leaves(dtypes=[dtype]), lr=1e-2, **options), scaler_of(64.0)
        left = []
        for step in range(4):
            set_scaled_grads(optimizer, step, scaler.get_scale(), math.inf if step == 2 else None)
            scaler.step(optimizer)
            scaler.update()
            left.append([grad.clone() for grad in grads_of(optimizer)])
        results.append(left)
    assert_same(*results)


@EVERY
def test_on_infinity_and_without_a_scale_they_stay(make):
    optimizer = make(leaves())
    for scale, found_inf in ((SCALE, 1.0), (SCALE, 1.0), (None, 0.0)):
        set_grads(params_of(optimizer), 0)
        before = [grad.clone() for grad in grads_of(optimizer)]
        scaled(optimizer, scale, found_inf)
        assert_same(grads_of(optimizer), before)
    versions = [grad._version for grad in grads_of(optimizer)]
    optimizer.step()
    assert_same(grads_of(optimizer), before)
    assert [grad._version for grad in grads_of(optimizer)] == versions, "a plain step only reads gradients"


LAYOUTS = {
    "transposed": lambda g: g.t().contiguous().t(),
    "with gaps": lambda g: torch.stack([g, g + 1], dim=-1)[..., 0],
    "negated": lambda g: torch._neg_view(-g),
    "lazy clone": torch._lazy_clone,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["AdamW", "AdamP clipped"])
@pytest.mark.parametrize("backend", ["numba", "eager"])
def test_gradients_of_any_layout(layout, name, backend):
    optimizer = MAKERS[name](leaves([(6, 5), (4, 4)]), backend=backend)
    for step in range(3):
        set_grads(params_of(optimizer), step)
        originals = grads_of(optimizer)
        expected = unscaled_by_hand(optimizer)
        for p in params_of(optimizer):
            p.grad = LAYOUTS[layout](p.grad)
        given = grads_of(optimizer)
        kept = [original.clone() for original in originals]
        scaled(optimizer)
        assert_same(grads_of(optimizer), expected)
        assert all(a is b for a, b in zip(grads_of(optimizer), given, strict=True)), (
            "the same tensors, written in place"
        )
        if layout == "lazy clone":
            assert_same(originals, kept)  # a clone's memory is its own once it is written


def test_zeros_without_memory_stay_zeros():
    (param,) = leaves([(3, 4)])
    optimizer = fusedadam.AdamW([param])
    param.grad = torch._efficientzerotensor((3, 4))
    scaled(optimizer)
    assert param.grad._is_zerotensor()


@pytest.mark.parametrize("storage", ["exact", "8bit"])
def test_with_storage_formats(storage):
    optimizer = fusedadam.AdamW(leaves([(64, 64), (33,)], [BF16]), storage=storage)
    for step in range(3):
        assert_unscaled(optimizer, step)


def test_autograd_sees_that_they_were_written():
    optimizer = fusedadam.AdamW(leaves())
    for step in range(3):
        set_grads(params_of(optimizer), step)
        versions = [grad._version for grad in grads_of(optimizer)]
        scaled(optimizer)
        assert all(g._version > v for g, v in zip(grads_of(optimizer), versions, strict=True))


# what cannot be divided where it is


def expanded(params):
    params[0].grad = torch.ones(1, 6).expand(4, 6)


def shared(params):
    params[1].grad = params[0].grad.view(-1)[:7]


def inference(params):
    with torch.inference_mode():
        params[1].grad = torch.ones(7)


REFUSED = {expanded: "is it expanded", shared: "two parameters share memory", inference: "is an inference tensor"}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("steps", [0, 2], ids=["at first", "later"])
@pytest.mark.parametrize("name", ["AdamW", "AdamP clipped"])
def test_gradients_that_cannot_be_written_are_refused(spoil, steps, name):
    """Before anything is written, states included; a step without a scale takes them as they are."""
    optimizer = MAKERS[name](leaves())
    for step in range(steps):
        set_grads(params_of(optimizer), step)
        scaled(optimizer)
    set_grads(params_of(optimizer), steps)
    spoil(params_of(optimizer))
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match=REFUSED[spoil]):
        scaled(optimizer)
    assert_unchanged(optimizer, before)
    scaled(optimizer, scale=None)
    set_grads(params_of(optimizer), steps)
    scaled(optimizer)


def test_gradients_that_come_to_share_memory_are_noticed():
    """Where only addresses have changed since the last step; neighbors in one buffer do not share any."""
    first, second = params = leaves([(8,), (8,)])
    optimizer, buffer = fusedadam.AdamW(params), torch.ones(16)
    for begin in (0, 8, 0):
        first.grad, second.grad = buffer[begin : begin + 8], buffer[8 - begin : 16 - begin]
        buffer.fill_(SCALE)
        scaled(optimizer)
        assert torch.equal(buffer, torch.ones(16))
    first.grad = second.grad[:]
    with pytest.raises(RuntimeError, match="two parameters share memory"):
        scaled(optimizer)
    assert torch.equal(buffer, torch.ones(16))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has gradients of the parameter's dtype")
@pytest.mark.parametrize("backend", ["numba", "eager"])
@pytest.mark.parametrize("layout", ["as the parameter", "with gaps"])
def test_float64_gradients_keep_their_bits(backend, layout):
    """Of parameters that are updated in float32."""
    (param,) = leaves([(4,)])
    param.grad_dtype = None
    optimizer = fusedadam.AdamW([param], backend=backend)
    for scale, found_inf in ((8.0, 0.0), (1.0, 0.0), (8.0, 1.0)):
        param.grad = torch.tensor([1e300, 1e-60, 1 / 3, -7.0], dtype=F64)
        if layout == "with gaps":
            param.grad = LAYOUTS[layout](param.grad)
        expected = param.grad / (1 if found_inf else scale)
        scaled(optimizer, scale, found_inf)
        assert torch.equal(param.grad, expected)
