"""FakeTensorMode and transforms of torch.func: their tensors have no memory, which an error says before any write."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedadam
from fusedadam.functional import adamw_

OF_MODE = "belongs to FakeTensorMode, and has no memory to read or write; make the optimizer and call"
OF_TRANSFORM = r"belongs to a transform of torch\.func, such as vmap or grad, and has no memory"
BACKENDS = pytest.mark.parametrize("backend", ["numba", "eager"])
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def leaf():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return param


def in_vmap(function):
    return torch.vmap(function)(torch.ones(2, 3))


def in_grad(function):
    return torch.func.grad(lambda x: (function(x), x.sum())[1])(torch.ones(3))


TRANSFORMS = pytest.mark.parametrize("transform", [in_vmap, in_grad])


@BACKENDS
def test_an_optimizer_under_a_mode(backend):
    with FakeTensorMode():
        param = leaf()
        with pytest.raises(RuntimeError, match=f"params: a new tensor {OF_MODE}"):
            fusedadam.SGD([param], backend=backend)
    with pytest.raises(RuntimeError, match=f"param {OF_MODE}"):
        fusedadam.SGD([param], backend=backend)


@BACKENDS
def test_a_first_step_under_a_mode_changes_nothing(backend):
    param = leaf()
    optimizer = fusedadam.AdamW([param], backend=backend)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match=f"param: a new tensor {OF_MODE}"),
    ):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(param, torch.ones(3))
    optimizer.step()
    assert optimizer.state[param]["step"] == 1


def test_a_fake_gradient():
    param = leaf()
    optimizer = fusedadam.AdamW([param])
    with FakeTensorMode():
        param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=f"grad {OF_MODE}"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=f"grad {OF_MODE}"):
        fusedadam.clip_grad_norm_([param], 1.0)
    assert not optimizer.state


@BACKENDS
@TRANSFORMS
@pytest.mark.parametrize("steps", [0, 2])
def test_a_gradient_inside_a_transform(transform, backend, steps):
    param = leaf()
    optimizer = fusedadam.AdamW([param], backend=backend)
    for _ in range(steps):
        optimizer.step()
    before, seen = param.detach().clone(), []

    def function(x):
        param.grad = 2 * x
        with pytest.raises(RuntimeError, match=f"^(grad|param: a new tensor) {OF_TRANSFORM}"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=f"^(grad|param: a new tensor) {OF_TRANSFORM}"):
            fusedadam.clip_grad_norm_([param], 1.0)
        seen.append(x)
        return x

    transform(function)
    assert len(seen) == 1
    assert torch.equal(param, before)
    assert [state["step"] for state in optimizer.state.values()] == [2] * (steps > 0)
    param.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[param]["step"] == steps + 1


@TRANSFORMS
def test_a_parameter_inside_a_transform(transform):
    def function(x):
        with pytest.raises(RuntimeError, match=f"^param(s: a new tensor)? {OF_TRANSFORM}"):
            fusedadam.AdamW([x])
        return x

    transform(function)


@TRANSFORMS
def test_functions_name_the_argument(transform):
    def function(x):
        others = [torch.zeros(3) for _ in range(3)]
        with pytest.raises(RuntimeError, match=rf"^\w+ {OF_TRANSFORM}"):
            adamw_(others[0], x, *others[1:], step=1)
        return x

    transform(function)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=OF_MODE):
        adamw_(torch.zeros(3), *(torch.zeros(3) for _ in range(3)), step=1)
