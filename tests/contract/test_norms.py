"""``optimizer.norms()``, against norms in float64 of what was there before and after the step."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fusedadam
from fusedadam.in_backward import step_in_backward
from tests.contract.common import MAKERS, assert_same, leaves, params_of, set_grads
from tests.support import BF16, F32, F64, PLACES

# kernels take long to compile: the quick tests take a rule that visits elements once, and one that sums by itself
SOME = [
    pytest.param(make, id=name, marks=[pytest.mark.exhaustive] * (name not in ("AdamW", "AdamP clipped")))
    for name, make in MAKERS.items()
]
SHAPES = [(40, 30), (7,), (3, 2, 3), (), (9000,), (0, 3)]


def parameters(dtypes=(F32, F64), device="cpu"):
    return leaves(SHAPES, dtypes, seed=1, device=device)


def length(tensor):
    return torch.linalg.vector_norm(tensor.detach().to(torch.promote_types(tensor.dtype, F64))).item()


def watched_step(optimizer, params, seed=0):
    """The norms that a step reports, and what they should be."""
    optimizer.watch_norms = True
    set_grads(params, seed)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    rows = [
        [length(param.grad), length(param.detach().double() - old.double()), length(param)]
        for param, old in zip(params, before, strict=True)
    ]
    return optimizer.norms(), torch.tensor(rows, dtype=F64)


@pytest.mark.parametrize("place", [place for place in PLACES if place.id != "cpu-triton"])
@pytest.mark.parametrize("make", SOME)
def test_equals_float64_on_every_device(make, place):
    device, backend = place
    params = parameters(device=device)
    optimizer = make(params, backend=backend)
    for step in range(2):
        norms, expected = watched_step(optimizer, params, step)
    assert norms.params == params
    torch.testing.assert_close(norms.values.cpu(), expected, rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(torch.stack([norms.grad, norms.update, norms.weight], 1), norms.values, rtol=0, atol=0)
    assert norms.values.dtype == F64


@pytest.mark.parametrize("make", MAKERS.values(), ids=[*MAKERS])
def test_equals_float64_for_every_optimizer(make):
    params = parameters()
    norms, expected = watched_step(make(params, backend="eager"), params)  # which compiles nothing
    torch.testing.assert_close(norms.values, expected, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("make", SOME)
@pytest.mark.parametrize("options", [{}, {"storage": "8bit"}], ids=["plain", "8bit"])
def test_steps_that_measure_have_the_same_bits(make, options):
    watched, plain = (make(parameters((F32, BF16, F64)), **options) for _ in range(2))
    for step in range(4):
        for optimizer in (watched, plain):
            set_grads(params_of(optimizer), step)
            optimizer.watch_norms = optimizer is watched and step != 2
            optimizer.step()
    assert_same(watched, plain)


@pytest.mark.parametrize("make", [MAKERS["AdamW clipped"], MAKERS["AdamP"]], ids=["AdamW clipped", "AdamP"])
def test_every_backend_has_the_same_bits(make):
    found = []
    for backend in ("numba", "eager", "triton"):
        params = parameters((F32,))
        norms, _ = watched_step(make(params, backend=backend), params)
        found.append(norms.values)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_names_and_order_over_groups_and_launches():
    params = parameters()
    groups = [
        {"params": [("c", params[2]), ("a", params[0])]},
        {"params": [("b", params[1])], "lr": 0.5, "amsgrad": True},
    ]
    optimizer = fusedadam.AdamW(groups)
    norms, expected = watched_step(optimizer, [params[2], params[0], params[1]])
    assert norms.names == ["c", "a", "b"]
    torch.testing.assert_close(norms.values, expected, rtol=2e-6, atol=0)
    logged = norms.as_dict()
    assert [*logged] == ["c", "a", "b"]
    assert logged["b"] == dict(zip(("grad", "update", "weight"), norms.values[2].tolist(), strict=True))


def test_parameters_without_names_are_numbered_and_those_without_a_gradient_left_out():
    params = parameters()
    optimizer = fusedadam.SGD(params, lr=0.1)
    optimizer.watch_norms = True
    set_grads(params, 0)
    params[1].grad = None
    optimizer.step()
    assert optimizer.norms().names == ["0", "2", "3", "4", "5"]
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.norms().names == []
    assert optimizer.norms().values.shape == (0, 3)


def test_norms_stay_as_they_were_when_later_steps_are_taken():
    params = parameters()
    optimizer = fusedadam.AdamW(params, lr=0.1)
    norms, expected = watched_step(optimizer, params)
    watched_step(optimizer, params, seed=1)
    torch.testing.assert_close(norms.values, expected, rtol=2e-6, atol=0)


def test_without_watching_there_are_none():
    params = parameters()
    optimizer = fusedadam.AdamW(params)
    with pytest.raises(RuntimeError, match=r"measured no norms.*watch_norms = True"):
        optimizer.norms()
    watched_step(optimizer, params)
    optimizer.watch_norms = False
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"measured no norms"):
        optimizer.norms()
    with pytest.raises(TypeError, match="watch_norms='yes' must be True or False"):
        optimizer.watch_norms = "yes"


def test_asking_now_and_then_makes_no_new_plans():
    params = parameters()
    optimizer = fusedadam.AdamW(params)
    plans = {False: set(), True: set()}
    for step in range(8):
        set_grads(params, step)
        optimizer.watch_norms = step % 2 == 1
        optimizer.step()
        plans[optimizer.watch_norms].add(id(optimizer._stepper.last_plan))
        assert optimizer._stepper.last_plan.measures_norms == optimizer.watch_norms
    assert [len(made) for made in plans.values()] == [1, 1]
    optimizer.add_param_group({"params": parameters()[:1]})
    assert not optimizer._stepper.plans
    norms, expected = watched_step(optimizer, params_of(optimizer))
    torch.testing.assert_close(norms.values, expected, rtol=2e-6, atol=0)


def test_gradients_are_unscaled_and_not_clipped():
    params = parameters()
    optimizer = fusedadam.AdamW(params, max_grad_norm=0.1)
    optimizer.watch_norms = True
    set_grads(params, 0)
    expected = [length(param.grad) for param in params]
    for param in params:
        param.grad *= 4
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.norms().grad, torch.tensor(expected, dtype=F64), rtol=2e-6, atol=0)


def test_a_skipped_step_leaves_the_norms_of_the_one_before():
    params = parameters()
    optimizer = fusedadam.AdamW(params, skip_nonfinite=True)
    norms, _ = watched_step(optimizer, params)
    params[0].grad[0] = math.inf
    optimizer.step()
    assert torch.equal(optimizer.norms().values, norms.values)
    assert optimizer.skipped_steps == 1


def test_an_update_is_measured_before_it_is_rounded_to_bfloat16():
    param = torch.nn.Parameter(torch.ones(64, dtype=BF16))
    param.grad = torch.ones_like(param)
    optimizer = fusedadam.SGD([param], lr=2**-12)
    optimizer.watch_norms = True
    optimizer.step()
    assert torch.equal(param, torch.ones(64, dtype=BF16)), "bfloat16 has no room for so small a step"
    assert optimizer.norms().update.item() == 8 * 2**-12


def test_complex_parameters():
    param = torch.nn.Parameter(torch.tensor([3 + 4j, 0j]))
    param.grad = torch.tensor([0j, 5 - 12j])
    optimizer = fusedadam.SGD([param], lr=0.5)
    optimizer.watch_norms = True
    optimizer.step()
    assert optimizer.norms().values.tolist() == [[13.0, 6.5, pytest.approx(math.hypot(5, 6.5))]]


def test_stepping_in_backward_measures_them_too():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    plain = copy.deepcopy(model)
    ahead = step_in_backward(model, lambda params: fusedadam.AdamW(model.named_parameters(), lr=0.1))
    expected = fusedadam.AdamW(plain.named_parameters(), lr=0.1)
    for net, optimizer in ((model, ahead), (plain, expected)):
        optimizer.watch_norms = True
        net(torch.ones(5, 4)).square().sum().backward()
        optimizer.step()
    assert ahead.norms().names == expected.norms().names == [name for name, _ in model.named_parameters()]
    assert torch.equal(ahead.norms().values, expected.norms().values)


def test_flattened_parameters_are_refused():
    param = torch.nn.Parameter(torch.ones(4))
    param._fsdp_flattened, param.grad = True, torch.ones(4)
    optimizer = fusedadam.AdamW([param])
    optimizer.watch_norms = True
    with pytest.raises(ValueError, match=r"watch_norms=True.*FullyShardedDataParallel"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4))
