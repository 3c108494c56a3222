"""AdamP against the package of the paper's authors, and against the specification written out by hand.

AdamP chooses the projection of a parameter by comparing cosines with a threshold, so the gradients here are
constructed: their cosines have chosen values, often one part in a thousand from the threshold.
"""

from __future__ import annotations

import functools
import math

import adamp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import fusedadam
from tests.meaning.by_hand import AdamPByHand, largest_cosine
from tests.meaning.judge import judge
from tests.meaning.made_to_measure import KINDS, gradient, values
from tests.support import BF16, F16, F32, F64, QUICK_PLACES, pairwise

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "delta": 0.1, "wd_ratio": 0.2}
FLAGS = ("weight_decay", "nesterov", "maximize")
EVERY_FLAG = pairwise((0.0, 0.3), (False, True), (False, True))
STEPS = 56
# Triton's interpreter would take minutes for so many steps; tests/backends shows that it gives the bits of the others


def as_it_is(t):
    return t


def channels_last(t):
    return t.contiguous(memory_format=torch.channels_last)


def transposed(t):
    return t.t().contiguous().t()


def with_gaps(t):
    return torch.stack([t, t], dim=-1)[..., 0]


PARAMS = {  # shape, how the parameter lies in memory, how its gradient does
    "matrix": ((6, 20), as_it_is, as_it_is),
    "convolution": ((4, 3, 3, 3), channels_last, as_it_is),
    "gradient channels last": ((4, 3, 3, 3), as_it_is, channels_last),
    "both channels last": ((3, 5, 2, 2), channels_last, channels_last),
    "rows of nine": ((5, 1, 3, 3), as_it_is, as_it_is),
    "transposed": ((7, 5), transposed, as_it_is),
    "gradient transposed": ((7, 5), as_it_is, transposed),
    "with gaps": ((4, 6), with_gaps, as_it_is),
    "gradient with gaps": ((2, 3, 4), as_it_is, with_gaps),
    "one column": ((8, 1), as_it_is, as_it_is),
    "one row": ((1, 12), as_it_is, as_it_is),
    "vector": ((13,), as_it_is, as_it_is),
    "scalar": ((), as_it_is, as_it_is),
}


@functools.cache
def run_by_hand(dtype, flags):
    """In float64, from values and gradients that ``dtype`` holds: the start, each step's gradients, and the runs.

    Each parameter goes through all the kinds, and now and then has no gradient. The decisions are in ``decided``.
    """
    start = [v.to(dtype) for v in values(shape for shape, _, _ in PARAMS.values())]
    runs = [AdamPByHand(v.double(), **OPTIONS, **dict(zip(FLAGS, flags, strict=True))) for v in start]
    generator, kinds, grads, decided = torch.Generator().manual_seed(1), list(KINDS), [], []
    for step in range(STEPS):
        grads.append([None] * len(runs))
        for k, run in enumerate(runs):
            run.projection = "none"
            if step % 5 != k % 7:
                grads[step][k] = gradient(run.p, kinds[(step + k) % len(kinds)], step, generator).to(dtype)
                run.step(grads[step][k].double())
        decided.append([run.projection for run in runs])
    return start, grads, runs, decided


def train_theirs(dtype, flags):
    """The package views tensors as rows, so they lie plainly; it has no ``maximize``."""
    start, grads, _, _ = run_by_hand(dtype, flags)
    params = [torch.nn.Parameter(v.clone()) for v in start]
    options = dict(zip(FLAGS, flags, strict=True))
    sign = -1 if options.pop("maximize") else 1
    optimizer = adamp.AdamP(params, **OPTIONS, **options)
    for own in grads:
        for p, grad in zip(params, own, strict=True):
            p.grad = None if grad is None else sign * grad
        optimizer.step()
    return [(p, optimizer.state[p]) for p in params]


def train_ours(dtype, flags, place):
    """Asserts that each step of ours decides as the version by hand does."""
    device, backend = place
    start, grads, _, decided = run_by_hand(dtype, flags)
    lays = [lay for _, *lay in PARAMS.values()]
    params = [torch.nn.Parameter(lay(v.to(device, copy=True))) for v, (lay, _) in zip(start, lays, strict=True)]
    optimizer = fusedadam.AdamP(params, backend=backend, **OPTIONS, **dict(zip(FLAGS, flags, strict=True)))
    for step, own in enumerate(grads):
        for p, grad, (_, lay) in zip(params, own, lays, strict=True):
            p.grad = None if grad is None else lay(grad.to(device, copy=True))
        optimizer.step()
        made = optimizer.projections()
        assert dict(zip(PARAMS, [made.get(p, "none") for p in params], strict=True)) == dict(
            zip(PARAMS, decided[step], strict=True)
        ), f"step {step}"
    return [(p, optimizer.state[p]) for p in params]


def assert_close(results, expected, rtol, atol):
    names = [f"{name} {what}" for name in PARAMS for what in ("param", "step", "exp_avg", "exp_avg_sq")]
    mine, wanted = (
        [
            torch.as_tensor(t).detach().cpu()
            for p, s in run
            for t in (p, float(s["step"]), s["exp_avg"], s["exp_avg_sq"])
        ]
        for run in (results, expected)
    )
    for name, a, b in zip(names, mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=functools.partial("{}: {}".format, name))


def possible(shape):
    if len(shape) < 2:
        return {"none"}
    return {"channel", "layer", "none"} - ({"layer"} if shape[0] == 1 else {"channel"} if shape[1:] == (1,) else set())


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_here_lie_where_they_say(kind):
    view, factor, projection = KINDS[kind]
    (p,) = values([(6, 20)])
    grad = gradient(p, kind, 1, torch.Generator().manual_seed(1))
    rows = 1 if view == "layer" else 6
    assert largest_cosine(grad, p, rows, 1e-8) == pytest.approx(factor * 0.1 / math.sqrt(120 // rows), rel=1e-9)
    by_hand = AdamPByHand(p)
    by_hand.step(grad)
    assert by_hand.projection == projection


@pytest.mark.parametrize("flags", EVERY_FLAG, ids=str)
def test_the_version_by_hand_is_the_packages(flags):
    _, _, runs, decided = run_by_hand(F64, flags)
    results = [(run.p, {"step": run.t, "exp_avg": run.m, "exp_avg_sq": run.v}) for run in runs]
    assert_close(results, train_theirs(F64, flags), rtol=1e-12, atol=1e-14)
    for (shape, _, _), *made in zip(PARAMS.values(), *decided, strict=True):
        assert set(made) == possible(shape)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("flags", EVERY_FLAG, ids=str)
def test_equals_the_package_in_float64(flags, place):
    assert_close(train_ours(F64, flags, place), train_theirs(F64, flags), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("place", QUICK_PLACES)
def test_is_as_close_to_float64_as_the_package_is_in_float32(place):
    flags = EVERY_FLAG[2]
    exact = [run.p for run in run_by_hand(F32, flags)[2]]
    ours_off, theirs_off = (
        max((p.detach().cpu() - e).abs().max().item() for (p, _), e in zip(trained, exact, strict=True))
        for trained in (train_ours(F32, flags, place), train_theirs(F32, flags))
    )
    assert ours_off <= 2 * theirs_off + 1e-7


def step_and_judge(place, params, kinds, state_dtype=None, slack=4, **options):
    """A step for each kind, and each is judged by itself: from the stored values, decided and rounded as by hand."""
    device, backend = place
    options = OPTIONS | options
    generator = torch.Generator().manual_seed(4)
    by_hands = [AdamPByHand(p.detach().cpu().double(), **options) for p in params]
    optimizer = fusedadam.AdamP(params, state_dtype=state_dtype, backend=backend, **options)
    seen = set()
    for step, kind in enumerate(kinds):
        grads = [
            gradient(by_hand.p, kind, step, generator).to(p.dtype) for p, by_hand in zip(params, by_hands, strict=True)
        ]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.to(device)
        optimizer.step()
        made = optimizer.projections()
        for p, grad, by_hand in zip(params, grads, by_hands, strict=True):
            label = f"{kind} {tuple(p.shape)} {p.dtype}"
            judge(by_hand, p, optimizer.state[p], grad, label, slack)
            assert made[p] == by_hand.projection, label
            assert optimizer.state[p]["exp_avg"].dtype == (state_dtype or p.dtype)
        seen |= set(made.values())
    return seen


LOW = [(BF16, None), (F16, None), (BF16, F32), (F16, F32), (F32, BF16)]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize(("dtype", "state_dtype"), LOW, ids=str)
def test_low_precision_decides_by_float32_sums_of_the_stored_values(dtype, state_dtype, place):
    params = [torch.nn.Parameter(v.to(place[0], dtype)) for v in values([(6, 20), (4, 3, 3, 3), (33,)])]
    seen = step_and_judge(place, params, [*KINDS] * 2, state_dtype, weight_decay=0.3, nesterov=True)
    assert seen == {"channel", "layer", "none"}


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("shape", [(2, 8200), (1, 20011), (2, 3, 4000), (3001, 2)], ids=str)
def test_wide_rows_and_many_rows(shape, place):
    params = [torch.nn.Parameter(v.to(place[0], F32)) for v in values([shape])]
    seen = step_and_judge(place, params, ["channels well below", "layer well below", "all well above"], slack=16)
    assert seen == possible(shape)


EPS = 1e-2


def zero_row(p, grad):
    return torch.cat([torch.zeros_like(p[:1]), p[1:]]), grad


def zero_parameter(p, grad):
    return torch.zeros_like(p), grad


def zero_gradient_row(p, grad):
    return p, torch.cat([torch.zeros_like(grad[:1]), grad[1:]])


def zero_gradient(p, grad):
    return p, torch.zeros_like(grad)


def parameter_below_eps(p, grad):
    return 1e-4 * p, grad


def gradient_below_eps(p, grad):
    return p, 1e-4 * p


def short_gradient_just_above(p, grad):
    return p, 1.005 * 0.1 / math.sqrt(6) * EPS * normalize(p, dim=1)


def short_gradient_just_below(p, grad):
    return p, 0.995 * 0.1 / math.sqrt(6) * EPS * normalize(p, dim=1)


def both_below_eps(p, grad):
    return 1e-4 * p, 1e-4 * p


DEGENERATE = [zero_row, zero_parameter, zero_gradient_row, zero_gradient, parameter_below_eps, gradient_below_eps]
DEGENERATE += [short_gradient_just_above, short_gradient_just_below, both_below_eps]


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("kind", ["channels well below", "layer well below", "all well above"])
def test_lengths_of_zero_and_below_eps(kind, place):
    """The cosine clamps the length of the gradient and of the parameter at eps each by itself."""
    device, backend = place
    options = {**OPTIONS, "eps": EPS, "weight_decay": 0.3}
    (value,), generator = values([(4, 6)]), torch.Generator().manual_seed(5)
    grads = [gradient(value, kind, step, generator) for step in range(3)]
    starts = [change(value, grads[0])[0] for change in DEGENERATE]
    ours, theirs = ([torch.nn.Parameter(v.to(d, copy=True)) for v in starts] for d in (device, "cpu"))
    by_hands = [AdamPByHand(v, **options) for v in starts]
    mine, package = fusedadam.AdamP(ours, backend=backend, **options), adamp.AdamP(theirs, **options)
    for grad in grads:
        for change, p, q, by_hand in zip(DEGENERATE, ours, theirs, by_hands, strict=True):
            q.grad = change(value, grad)[1].clone()
            p.grad = q.grad.to(device)
            by_hand.step(q.grad)
        mine.step()
        package.step()
        made = mine.projections()
        for change, p, q, by_hand in zip(DEGENERATE, ours, theirs, by_hands, strict=True):
            assert made[p] == by_hand.projection, change.__name__
            torch.testing.assert_close(by_hand.p, q.detach(), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("place", QUICK_PLACES)
def test_empty_parameters_are_stepped_and_not_projected(place):
    shapes = [(0,), (6, 20), (0, 5), (5, 0), (2, 0, 3)]
    step_and_judge(place, [torch.nn.Parameter(v.to(place[0])) for v in values(shapes)], KINDS)


@pytest.mark.parametrize("place", QUICK_PLACES)
def test_each_group_has_its_own_options(place):
    own = [{"delta": 0.05}, {"wd_ratio": 0.9}, {"eps": 1e-3}, {"nesterov": True}, {"lr": 3e-3, "weight_decay": 0.0}]
    params = [torch.nn.Parameter(v.to(place[0])) for v in values([(6, 20)] * len(own))]
    groups = [{"params": [p], **options} for p, options in zip(params, own, strict=True)]
    common = {**OPTIONS, "weight_decay": 0.3}
    by_hands = [AdamPByHand(p.detach().cpu(), **common | options) for p, options in zip(params, own, strict=True)]
    optimizer = fusedadam.AdamP(groups, backend=place[1], **common)
    generator = torch.Generator().manual_seed(6)
    for step, kind in enumerate(KINDS):
        for p, by_hand in zip(params, by_hands, strict=True):
            grad = gradient(by_hand.p, kind, step, generator)
            p.grad = grad.to(place[0])
            by_hand.step(grad)
        optimizer.step()
        made = optimizer.projections()
        assert [made.get(p, "none") for p in params] == [by_hand.projection for by_hand in by_hands]
    for p, by_hand in zip(params, by_hands, strict=True):
        torch.testing.assert_close(p.detach().cpu(), by_hand.p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_projected(bad, place):
    """NaN is below no threshold; only where the gradient is not finite does the parameter become NaN."""
    (value,) = values([(6, 20)])
    param = torch.nn.Parameter(value.to(place[0]))
    grad = gradient(value, "channels well below", 0, torch.Generator().manual_seed(7))
    grad[2, 3] = bad
    param.grad = grad.to(place[0])
    optimizer = fusedadam.AdamP([param], backend=place[1])
    optimizer.step()
    assert optimizer.projections() == {param: "none"}
    assert param.isnan().nonzero().tolist() == [[2, 3]]


shapes = st.lists(st.integers(1, 6), min_size=2, max_size=4)


@pytest.mark.parametrize("place", QUICK_PLACES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape_in_any_order_of_memory(place, data):
    shape = data.draw(shapes)
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(2)]
    options = {
        "lr": data.draw(st.sampled_from([1e-3, 0.1])),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.5])),
        "delta": data.draw(st.sampled_from([0.0, 0.1, 0.7, 3.3])),
        "nesterov": data.draw(st.booleans()),
        "maximize": data.draw(st.booleans()),
    }

    def lay(value, order):
        back = [order.index(d) for d in range(len(order))]
        return value.permute(order).contiguous().permute(back)

    (value,) = values([shape], seed=data.draw(st.integers(0, 99)))
    param = torch.nn.Parameter(lay(value.to(place[0]), orders[0]))
    by_hand, optimizer = AdamPByHand(value, **options), fusedadam.AdamP([param], backend=place[1], **options)
    for step in range(2):
        kind = data.draw(st.sampled_from(list(KINDS)))
        grad = gradient(by_hand.p, kind, step, torch.Generator().manual_seed(step), options["delta"])
        param.grad = lay(grad.to(place[0]), orders[1])
        optimizer.step()
        by_hand.step(grad)
        assert optimizer.projections()[param] == by_hand.projection
    torch.testing.assert_close(param.detach().cpu(), by_hand.p, rtol=1e-12, atol=1e-14)
