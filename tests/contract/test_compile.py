"""torch.compile of a whole training step: the optimizer is one graph break, and nothing is compiled twice."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch._dynamo.utils import counters

import fusedadam
from tests.contract.common import MAKERS, Small, assert_same, batch, leaves, params_of, train
from tests.support import F64

OPTIMIZERS = pytest.mark.parametrize("name", ["AdamW", "AdamP clipped", "EmaAdamW"])
STEPS = 6


@pytest.fixture(autouse=True)
def compiler():
    """Nothing compiled before counts, and nothing is left for later tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def training(name, dtype=F64):
    """A step of training, and its optimizer."""
    model = Small(dtype)
    optimizer = MAKERS[name](model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return optimizer, step


def run(optimizer, step, rates):
    """A training in which the learning rate is another one each time."""
    losses = []
    for k, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        losses.append(step(batch(k, F64)))
    return losses


RATES = [1e-2 / (k + 1) for k in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "backend"), [("AdamW", "eager"), *((n, "aot_eager") for n in ("AdamW", "AdamP", "EmaAdamW"))]
)
def test_a_compiled_training_step_is_the_plain_one_and_is_compiled_once(name, backend):
    """Whatever changes between steps (lr, counts, addresses) is no constant that a guard would look at."""
    plain, plain_step = training(name)
    expected = run(plain, plain_step, RATES)
    optimizer, step = training(name)
    built, build = [], torch._dynamo.lookup_backend(backend)

    def counting(graph, inputs):
        built.append(graph)
        return build(graph, inputs)

    compiled = torch.compile(step, backend=counting)
    losses = run(optimizer, compiled, RATES[:1])
    first, known = len(built), counters["stats"]["unique_graphs"]
    assert min(first, known) > 0, "nothing was compiled, so nothing is tested"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for k in range(1, STEPS):
            optimizer.param_groups[0]["lr"] = RATES[k]
            losses.append(compiled(batch(k, F64)))
    assert len(built) == first
    assert counters["stats"]["unique_graphs"] == known
    tolerance = {"rtol": 0, "atol": 0} if backend == "eager" else {"rtol": 1e-9, "atol": 1e-12}
    assert_same(losses, expected, **tolerance)
    assert_same(optimizer, plain, **tolerance)


def assert_alike(trained):
    """``trained(compiled)`` returns an optimizer; ``compiled`` compiles a function, or leaves it as it is."""
    assert_same(trained(lambda function: function), trained(functools.partial(torch.compile, backend="eager")))


@OPTIMIZERS
def test_other_options_and_a_tensor_lr_compile_nothing_anew(name):
    changes = [
        {"lr": torch.tensor(0.01)}, {"lr": torch.tensor(0.02)}, {"weight_decay": 0.3}, {"betas": (0.5, 0.9)},
        {"eps": 1e-3}, {"lr": 0.03},
    ]  # fmt: skip

    def trained(compiled):
        optimizer, step = training(name)
        step = compiled(step)
        step(batch(0, F64))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for k, change in enumerate(changes, start=1):
                optimizer.param_groups[0].update(change)
                step(batch(k, F64))
        return optimizer

    assert_alike(trained)


@OPTIMIZERS
def test_the_step_by_itself_may_be_compiled(name):
    """As torch advises for its own optimizers; here it changes nothing."""

    def trained(compiled):
        optimizer, _ = training(name)
        step = compiled(lambda: optimizer.step())
        for k in range(3):
            for p in params_of(optimizer):
                p.grad = torch.full_like(p, k - 0.5)
            step()
        return optimizer

    assert_alike(trained)


def test_a_compiled_model_and_a_plain_step_go_together():
    def trained(compiled):
        model = Small(F64)
        optimizer, forward = MAKERS["AdamW"](model.parameters()), compiled(model)
        for k in range(3):
            optimizer.zero_grad()
            forward(batch(k, F64)).backward()
            optimizer.step()
        return optimizer

    assert_alike(trained)


def test_a_closure_may_be_compiled():
    def trained(compiled):
        model = Small(F64)
        optimizer = MAKERS["EmaAdamW"](model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = model(batch(0, F64))
            loss.backward()
            return loss

        again = compiled(closure)
        losses = [optimizer.step(again).item() for _ in range(3)]
        assert losses[2] < losses[0]
        return optimizer

    assert_alike(trained)


def test_steps_take_no_references_away():
    """In torch 2.6, to ask whether TorchDynamo is at work takes one from None: Python died after 50,000 steps."""
    optimizer = train(fusedadam.AdamW(leaves()), 3)
    before = sys.getrefcount(None)
    for _ in range(200):
        optimizer.step()
    assert abs(sys.getrefcount(None) - before) < 100
