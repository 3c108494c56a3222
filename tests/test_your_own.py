"""A rule outside the package, in a package of its own, works in every way that ours do."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam import OPTIONS, FusedOptimizer, Scalar, State, Value, Values, rule
from fusedadam.ops import where
from tests.support import BF16, F32, F64, PLACES

PAGE = Path(__file__).parents[1] / "docs/rules.md"
SHAPES = [(64, 64), (33,), ()]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """The optimizer of docs/rules.md, as an installed package would have it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "optim.py").write_text(blocks[0], encoding="utf-8")
    (package / "__init__.py").write_text("from theirs.optim import AdaBelief as AdaBelief\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("theirs").AdaBelief
    for name in ("theirs", "theirs.optim"):
        sys.modules.pop(name, None)


def params(dtype=F32, device="cpu"):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]


def train(optimizer, steps, start=0):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()
    return optimizer


def values(optimizer):
    return [p.detach().cpu() for group in optimizer.param_groups for p in group["params"]]


def assert_same(one, other):
    torch.testing.assert_close(values(one), values(other), rtol=0, atol=0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_backend_gives_the_same_bits(theirs, place, dtype):
    device, backend = place
    ours = train(theirs(params(dtype, device), backend=backend, state_dtype=F32), 2)
    assert_same(ours, train(theirs(params(dtype), backend="eager", state_dtype=F32), 2))


@pytest.mark.parametrize("storage", [None, "8bit"])
def test_it_is_saved_loaded_copied_and_pickled(theirs, storage):
    optimizer = train(theirs(params(BF16), storage=storage), 2)
    assert ("exp_avg_codes" in optimizer.state[optimizer.param_groups[0]["params"][0]]) == (storage == "8bit")
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    resumed = theirs([torch.nn.Parameter(value.clone()) for value in values(optimizer)], storage=storage)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, 2, start=2)
    for other in (*others, resumed):
        assert_same(train(other, 2, start=2), optimizer)


def test_groups_schedulers_a_scaler_and_backward(theirs):
    first, *rest = params(F64)
    optimizer = theirs([{"params": [first], "weight_decay": 0.0}, {"params": rest}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    for step in range(2):
        train(optimizer, 1, start=step)
        scheduler.step()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    before = [value.clone() for value in values(optimizer)]
    train(optimizer, 1, start=2)
    torch.testing.assert_close(values(optimizer), before, rtol=0, atol=0)

    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [theirs(models[0].parameters()), fusedadam.step_in_backward(models[1], theirs)]
    for model, own in zip(models, optimizers, strict=True):
        model(torch.ones(2, 4)).square().sum().backward()
        own.step()
    assert_same(*optimizers)


def test_what_it_reports():
    """Through a public method, by parameter."""
    first, second = params()[:2]
    optimizer = fusedadam.Lamb([first, second], lr=1e-2)
    assert optimizer.report("trust_ratio") == {}
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert list(optimizer.report("trust_ratio")) == [first]
    assert optimizer.report("trust_ratio")[first] == optimizer.trust_ratios()[first]
    assert optimizer.report("grad_norm") == {}  # nothing is clipped
    with pytest.raises(ValueError, match="'norm' is not reported by Lamb; its rule reports 'grad_norm', 'trust_ratio'"):
        optimizer.report("norm")


def first_gradient_scalars(step, lr):
    return {"lr": lr, "is_first": where(step > 1, 0.0, 1.0)}


@rule(scalars=first_gradient_scalars)
def first_gradient(param: Value, grad: Value, average: Value, *, lr: Scalar, is_first: Scalar) -> Values:
    average = where(is_first > 0, grad, 0.875 * average + 0.125 * grad)
    param = param - lr * average
    return param, average


class FirstGradient(FusedOptimizer):
    rule = first_gradient
    states = {"average": State()}
    options = OPTIONS

    def __init__(self, params, lr=0.5, **common):
        super().__init__(params, lr=lr, **common)


@pytest.mark.parametrize("backend", ["numba", "eager"])
def test_a_state_that_begins_as_the_first_gradient_that_is_used(backend):
    """Not as the gradient of a step that is skipped, nor as what a state dict has from before the first step."""
    param = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = FirstGradient([param], backend=backend)
    optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 4.0), torch.ones(1)
    param.grad = torch.full((4, 3), torch.inf)
    optimizer.step()
    again = FirstGradient([param], backend=backend)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for value, expected in ((8.0, 2.0), (16.0, 0.875 * 2 + 0.125 * 4)):
        again.grad_scale, again.found_inf = torch.full((1,), 4.0), torch.zeros(1)
        param.grad = torch.full((4, 3), value)
        again.step()
        assert torch.equal(again.state[param]["average"], torch.full((4, 3), expected))
