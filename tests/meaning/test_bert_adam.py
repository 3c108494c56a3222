"""BertAdam and its schedules, against the specification written out by hand in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedadam
from fusedadam import schedules
from tests.meaning.by_hand import BertAdamByHand, EmaAdamByHand, norm_by_hand, schedule_by_hand
from tests.meaning.judge import judge
from tests.support import BF16, F16, F32, F64, QUICK_PLACES

pytestmark = [
    pytest.mark.filterwarnings("error"),  # neither schedules past their end nor clipping of nothing warn
    # but numpy may, under Triton's interpreter, about lanes that nobody uses
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

SCHEDULES = ("warmup_cosine", "warmup_constant", "warmup_linear", "warmup_poly")
SHAPES = [(7, 5), (40,), (), (0, 3), (3, 2, 2), (11,)]
OPTIONS = {"lr": 1e-2, "b2": 0.99, "weight_decay": 0.1}


class Both:
    """Ours and the version by hand, under the same gradients; ``dtypes`` and ``groups`` take turns."""

    def __init__(self, place, dtypes=(F64,), groups=({},), clip="parameter", state_dtype=None, **options):
        self.device, backend = place
        self.clip, self.groups, self.done = clip, groups, 0
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(s, generator=generator).to(dtypes[k % len(dtypes)]) for k, s in enumerate(SHAPES)]
        self.params = [torch.nn.Parameter(v.to(self.device)) for v in values]
        self.by_hand = [
            BertAdamByHand(p.detach().cpu().double(), **OPTIONS | options | dict(groups[self.group(k)]))
            for k, p in enumerate(self.params)
        ]
        parts = [{"params": self.params[k :: len(groups)], **own} for k, own in enumerate(groups)]
        self.optimizer = fusedadam.BertAdam(
            parts, clip=clip, state_dtype=state_dtype, backend=backend, **OPTIONS | options
        )

    def group(self, k):
        return k % len(self.groups)

    def move(self):
        """One step of ours; some norms are above 1 and some below, and now and then a gradient is missing or zero."""
        generator = torch.Generator().manual_seed(100 + self.done)
        for k, p in enumerate(self.params):
            grad = torch.randn(p.shape, generator=generator).to(p) * 10.0 ** -((self.done + k) % 3)
            p.grad = None if self.done % 4 == k - 1 else grad * (self.done % 5 != k)
        self.optimizer.step()
        self.done += 1

    def step(self):
        order = sorted(range(len(self.params)), key=self.group)  # as the groups have them
        rates = [self.by_hand[k].next_lr() for k in order]
        assert [float(rate) for rate in self.optimizer.get_lr()] == pytest.approx(rates, rel=1e-12, abs=0)
        self.move()
        present = {k: p for k, p in enumerate(self.params) if p.grad is not None}
        for k, p in present.items():
            together = [q.grad for j, q in present.items() if self.clipped_together(k, j)]
            label, norm = f"step {self.done}, {tuple(p.shape)} {p.dtype}", norm_by_hand(together)
            # float32 gradients may be summed in float32, whoever else is in the norm
            slack = 1e9 if p.dtype == F64 and any(g.dtype != F64 for g in together) else 16
            judge(self.by_hand[k], p, self.optimizer.state[p], p.grad, label, slack, norm=norm)

    def clipped_together(self, k, j):
        together = {
            "parameter": k == j,
            "group": self.group(k) == self.group(j) and self.params[k].dtype == self.params[j].dtype,
            "all": True,
        }
        return together[self.clip]


def test_the_version_by_hand_is_adam_without_bias_correction():
    value, options = torch.linspace(-1, 1, 50, dtype=F64), {"lr": 1e-2, "weight_decay": 0.1}
    bert = BertAdamByHand(value, b1=0.8, b2=0.95, e=1e-6, max_grad_norm=0.5, **options)
    adam = EmaAdamByHand(value, betas=(0.8, 0.95), eps=1e-6, bias_correction=False, **options)
    for step in range(10):
        grad = torch.sin(torch.arange(50, dtype=F64) * (step + 1))
        bert.step(grad)
        adam.step(grad * 0.5 / (grad.norm() + 1e-6))
    torch.testing.assert_close(bert.p, adam.p, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "factors"),  # at 0, 1/4, 1/2, 3/4, 1, 5/4 of the steps, with the first half to warm up in
    [
        ("warmup_cosine", [0, 0.5, 0.5, 0.5 - math.sqrt(1 / 8), 0, 0]),
        ("warmup_constant", [0, 0.5, 1, 1, 1, 1]),
        ("warmup_linear", [0, 0.5, 1, 0.5, 0, 0]),
        ("warmup_poly", [0, 0.5, math.sqrt(0.5), 0.5, 0, 0]),
    ],
)
def test_the_schedules_by_hand_and_ours_have_known_values(name, factors):
    for x, factor in zip((0.0, 0.25, 0.5, 0.75, 1.0, 1.25), factors, strict=True):
        assert schedule_by_hand(name, x, 0.5) == pytest.approx(factor, abs=1e-15)
        assert schedules.SCHEDULES[name](x, 0.5) == pytest.approx(factor, abs=1e-15)


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("warmup", [-1, 0.0, 0.25])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_over_its_whole_length_and_past_it(schedule, warmup, place):
    both = Both(place, schedule=schedule, warmup=warmup, t_total=8)
    for _ in range(13):
        both.step()


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize("dtypes", [(F64,), (F32, BF16, F16), (F64, F64, F32)], ids=str)
@pytest.mark.parametrize("clip", ["parameter", "group", "all"])
def test_clips_by_the_norm_of(clip, dtypes, place):
    both = Both(place, dtypes, groups=({}, {"max_grad_norm": 0.3}), clip=clip)
    for _ in range(6):
        both.step()


@pytest.mark.parametrize("clip", ["parameter", "group", "all"])
@pytest.mark.parametrize("max_grad_norm", [0, 0.0, -1.0, None])
def test_does_not_clip(max_grad_norm, clip):
    both = Both(("cpu", None), clip=clip, max_grad_norm=max_grad_norm)
    for _ in range(6):
        both.step()


@pytest.mark.parametrize("place", QUICK_PLACES)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(F32, None), (BF16, None), (F16, None), (BF16, F32), (F32, BF16)], ids=str
)
def test_stores_what_the_formula_gives_rounded_once(dtype, state_dtype, place):
    both = Both(place, (dtype,), state_dtype=state_dtype, warmup=0.5, t_total=10, maximize=True)
    for _ in range(6):
        both.step()
    for p in both.params:
        assert {both.optimizer.state[p][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {state_dtype or dtype}


@pytest.mark.parametrize("place", QUICK_PLACES)
def test_each_group_has_its_own_options(place):
    groups = (
        {"schedule": "warmup_cosine", "warmup": 0.5, "t_total": 6, "b1": 0.5},
        {"schedule": "warmup_poly", "t_total": 20, "b2": 0.9, "max_grad_norm": 0.0},
        {"lr": 3e-3, "e": 1e-3, "weight_decay": 0.0, "maximize": True},
    )
    both = Both(place, groups=groups)
    for _ in range(8):
        both.step()


def test_clipping_leaves_the_gradients_as_they_are():
    param = torch.nn.Parameter(torch.ones(5))
    param.grad = torch.full((5,), 7.0)
    fusedadam.BertAdam([param]).step()
    assert torch.equal(param.grad, torch.full((5,), 7.0))


def test_torchs_schedulers_work_on_top():
    both = Both(("cpu", None), warmup=0.25, t_total=8)
    scheduler = torch.optim.lr_scheduler.LambdaLR(both.optimizer, lambda n: 1 / (1 + n))
    for n in range(10):
        for by_hand in both.by_hand:
            by_hand.lr = OPTIONS["lr"] / (1 + n)
        both.step()
        scheduler.step()


def test_the_schedules_have_their_names():
    assert {name: getattr(schedules, name) for name in SCHEDULES} == dict(schedules.SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=200, deadline=None)
@given(
    xs=st.lists(st.floats(0, 3), min_size=1, max_size=5),
    warmup=st.just(-1) | st.just(0.0) | st.floats(0, 1, exclude_max=True),
)
def test_numbers_arrays_and_tensors_give_the_same_factor(name, xs, warmup):
    """Also past the end, where (1 - x) ** 0.5 would be NaN or complex, and the cosine rise again."""
    schedule, expected = schedules.SCHEDULES[name], [schedule_by_hand(name, x, warmup) for x in xs]
    near = {"rel": 1e-12, "abs": 1e-15}
    numbers, array = [schedule(x, warmup) for x in xs], schedule(np.array(xs), warmup)
    tensor = schedule(torch.tensor(xs, dtype=F64), warmup)
    assert all(isinstance(number, (int, float)) for number in numbers)
    assert numbers == pytest.approx(expected, **near)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == pytest.approx(expected, **near)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == F64
    assert tensor.tolist() == pytest.approx(expected, **near)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_tensors_keep_their_dtype_shape_and_device(name, dtype, device):
    x = torch.linspace(0, 2, 65, dtype=dtype, device=device).reshape(13, 5)
    factor = schedules.SCHEDULES[name](x, 0.25)
    assert (factor.dtype, factor.shape, factor.device) == (x.dtype, x.shape, x.device)
    expected = torch.tensor([schedule_by_hand(name, v, 0.25) for v in x.flatten().tolist()], dtype=F64).reshape(13, 5)
    torch.testing.assert_close(factor.cpu().double(), expected, rtol=0, atol=1e-6 if dtype == F32 else 1e-15)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.0), ("warmup", 0.0), ("warmup", 0.999), ("b1", 0.0), ("e", 0.0)])
def test_takes_the_ends_of_the_ranges(name, value):
    fusedadam.BertAdam([torch.nn.Parameter(torch.ones(3))], **{name: value})
