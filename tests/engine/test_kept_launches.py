"""Launches that operators and clipping keep from call to call: reused where they fit, and for nothing else."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import fusedadam
from fusedadam import clipping, functional
from fusedadam.ascend import operators
from fusedadam.engine.kept_launches import LaunchCache
from fusedadam.engine.launch import Launches
from tests.support import BF16, F16, F32, F64

ROLES = ("param", "grad", "exp_avg", "exp_avg_sq")


@pytest.fixture
def made(monkeypatch):
    """Counts the launches that are made, beginning with nothing kept."""
    counted, make = [], Launches.__init__

    def watched(self, members):
        counted.append(len(members))
        make(self, members)

    monkeypatch.setattr(Launches, "__init__", watched)
    for module, most in ((functional, 16), (clipping, 4)):
        monkeypatch.setattr(module, "LAUNCHES", LaunchCache(most))
    return counted


def drawn(*shapes, dtypes=(F32,) * 4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[(torch.rand(s, generator=generator) + 0.1).to(d) for s in shapes] for d in dtypes]


def expected(tensors, **options):
    """The step on copies, with nothing kept."""
    copies = [[t.clone() for t in own] for own in tensors]
    kept, functional.LAUNCHES = functional.LAUNCHES, LaunchCache(1)
    try:
        functional.adamw_(*copies, **options)
    finally:
        functional.LAUNCHES = kept
    return copies


def assert_step(tensors, **options):
    wanted = expected(tensors, **options)
    functional.adamw_(*tensors, **options)
    torch.testing.assert_close(tensors, wanted, rtol=0, atol=0)


def test_calls_with_alike_tensors_share_launches(made):
    sets = [drawn((3, 4), (7,), seed=k) for k in range(3)]
    for step in range(1, 4):
        for tensors in sets:
            assert_step(tensors, step=[step, step + 3], lr=0.1 * step)
            tensors[1] = [torch.rand_like(grad) for grad in tensors[1]]
    assert len(made) == 1 + 9, "one that is kept, and one for each comparison"


@pytest.mark.parametrize("backend", ["numba", "eager", "triton"])
def test_what_differs_is_not_taken_for_alike(made, backend):
    """The key has only the first tensors of each role; the rest is compared."""
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("with a GPU, Triton does not run on the CPU")
    first, second = (5, 4), (3, 6)
    variants = [
        drawn(first, second),
        drawn(first, (6, 3)),
        drawn(first, second, dtypes=(F32, BF16, F32, F32)),
        drawn(first, second, dtypes=(F16, F16, F32, F64)),
        [[own[0], own[1].t()] for own in drawn(first, (6, 3))],
        [[own[0], own[1][:, ::2]] for own in drawn(first, (3, 12))],
        [own if k != 1 else [own[0], torch._neg_view(own[1])] for k, own in enumerate(drawn(first, second))],
        drawn(first, second, (2,)),
        drawn(first),
    ]
    for _ in range(2):
        for tensors in variants:
            for flags in ({}, {"maximize": True}):
                assert_step(tensors, step=2, backend=backend, **flags)


def test_one_tensor_and_a_list_of_one_are_not_alike(made):
    tensors = drawn((4,))
    functional.adamw_(*(own[0] for own in tensors), step=1)
    functional.adamw_(*tensors, step=1)
    with pytest.raises(ValueError, match="must be what param is"):
        functional.adamw_(tensors[0][0], *tensors[1:], step=1)


def test_tensors_that_share_memory_are_refused_after_others_that_did_not(made):
    tensors = [own[0] for own in drawn((4,))]
    functional.adamw_(*tensors, step=1)
    memory = torch.rand(8)
    param, grad, exp_avg, exp_avg_sq = tensors
    for others in (
        (memory[:4], grad, memory[2:6], exp_avg_sq),
        (memory[:4], memory[:4], exp_avg, exp_avg_sq),
        (param, grad, exp_avg, exp_avg),
    ):
        functional.adamw_(*tensors, step=1)
        before = [t.clone() for t in others]
        with pytest.raises(RuntimeError, match="share memory"):
            functional.adamw_(*others, step=1)
        assert all(map(torch.equal, others, before))
    functional.adamw_(memory[:4], grad, memory[4:], exp_avg_sq, step=1)  # side by side


def test_gradients_may_share_memory(made):
    tensors = drawn((4,), (4,))
    functional.adamw_(*tensors, step=1)
    tensors[1] = [tensors[1][0]] * 2
    assert_step(tensors, step=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.untyped_storage().resize_(4), "too small"),
        (lambda t: t.untyped_storage().resize_(0), "without memory"),
        (lambda t: setattr(t, "data", torch.zeros(4, dtype=torch.int32)), "has dtype"),
        (lambda t: setattr(t, "data", torch.zeros(1).expand(4)), "may share memory"),
        (lambda t: setattr(t, "data", torch.zeros(5)), "has shape"),
    ],
)
def test_the_same_objects_that_changed_are_checked_again(made, change, says):
    tensors = [own[0] for own in drawn((4,))]
    for _ in range(2):
        functional.adamw_(*tensors, step=1)
    change(tensors[2])
    before = tensors[0].clone()
    with pytest.raises(RuntimeError, match=says):
        functional.adamw_(*tensors, step=1)
    assert torch.equal(tensors[0], before)


def test_other_objects_than_tensors_are_refused(made):
    tensors = drawn((4,), (3,))
    functional.adamw_(*tensors, step=1)
    tensors[2] = [tensors[2][0], [1.0, 2.0, 3.0]]
    with pytest.raises(TypeError, match=r"exp_avg\[1\] is a list"):
        functional.adamw_(*tensors, step=1)


def test_nothing_keeps_tensors_alive(made):
    tensors = drawn((4,), (3, 3))
    params = [torch.nn.Parameter(t) for t in tensors[0]]
    for p, grad in zip(params, tensors[1], strict=True):
        p.grad = grad
    for _ in range(2):
        functional.adamw_(*tensors, step=1)
        fusedadam.clip_grad_norm_(params, 1.0)
    watched = [weakref.ref(t) for own in (*tensors, params) for t in own]
    storages = [weakref.ref(t.untyped_storage()) for own in tensors for t in own]
    del tensors, params, p, grad
    gc.collect()
    assert not any(ref() is not None for ref in (*watched, *storages))


def test_a_few_launches_are_kept_the_last_ones_used(made):
    cache = functional.LAUNCHES
    for size in range(1, 40):
        functional.adamw_(*(own[0] for own in drawn((size,))), step=1)
        functional.adamw_(*(own[0] for own in drawn((1,))), step=1)
    assert len(cache._kept) == 16
    assert made.count(1) == len(made) == 39


def test_each_thread_has_its_own(made):
    tensors = [own[0] for own in drawn((4,))]
    functional.adamw_(*tensors, step=1)
    worker = threading.Thread(target=lambda: functional.adamw_(*tensors, step=1))
    worker.start()
    worker.join()
    functional.adamw_(*tensors, step=1)
    assert len(made) == 2


def test_an_update_that_is_not_run_leaves_what_was_kept(made):
    """The first phase of aclnn's operators only checks."""
    names = ("grad", "var", "m", "v", "s")
    tensors = {name: own[0] for name, own in zip(names, drawn((4,), dtypes=(F32,) * 5), strict=True)}
    options = (1e-3, 0.99, 0.9, 0.999, 1e-8, 1, True, 0.0)
    operators.ema_update(tensors, 1, *options).run()
    for _ in range(3):
        operators.ema_update({name: t.clone() for name, t in tensors.items()}, 1, *options).give_back()
        operators.ema_update(tensors, 1, *options).run()
    assert len(made) == 1


def test_an_operators_own_checks_are_made_for_tensors_unlike_those_before(made):
    var, grad, m, v = (own[0] for own in drawn((4,)))
    for _ in range(2):
        operators.npu_apply_fused_adamw_v2(var, grad, m, v, None, 1)
    with pytest.raises(RuntimeError, match="m has dtype"):
        operators.npu_apply_fused_adamw_v2(var, grad, m.half(), v, None, 1)
    with pytest.raises(RuntimeError, match="max_grad_norm has shape"):
        operators.npu_apply_fused_adamw_v2(var, grad, m, v, torch.zeros(5), 1)
    with pytest.raises(TypeError, match="var is a list"):
        operators.npu_apply_fused_adamw_v2([var], [grad], [m], [v], None, 1)


def test_kept_launches_outlive_inference_mode(made):
    tensors = [own[0] for own in drawn((4,))]
    with torch.inference_mode():
        functional.adamw_(*tensors, step=1)
    functional.adamw_(*tensors, step=2)
    assert len(made) == 1


def test_gradients_that_come_to_share_memory_are_not_clipped(made):
    """Launches that were kept were used without asking again."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(4)
    fusedadam.clip_grad_norm_(params, 0.5)
    memory = torch.ones(6)
    params[0].grad, params[1].grad = memory[:4], memory[2:]
    with pytest.raises(RuntimeError, match="share memory"):
        fusedadam.clip_grad_norm_(params, 0.5)
    assert torch.equal(memory, torch.ones(6))


def test_clipping_follows_gradients_that_move_and_change(made):
    params = [torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(5))]
    for k in range(6):
        for p in params:
            p.grad = torch.rand(p.shape).to(memory_format=torch.contiguous_format)
        if k == 3:
            params[1].grad = torch.rand(10)[::2]
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        for p, other in zip(params, others, strict=True):
            other.grad = p.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(others, 0.25)
        torch.testing.assert_close(fusedadam.clip_grad_norm_(params, 0.25), norm)
        torch.testing.assert_close([p.grad for p in params], [p.grad for p in others])
    assert len(made) == 3, "with other strides another, and back again"
