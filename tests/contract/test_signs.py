"""States that are declared as never negative are tried, so that no sign is lost in 8 bits."""

from __future__ import annotations

import inspect

import pytest
import torch

import fusedadam
from fusedadam import OPTIONS, FusedOptimizer, Scalar, State, TensorValue, Value, Values, ascend, checks, rule
from fusedadam.contract import refusals
from fusedadam.ops import sign, tensor_sum

PUBLIC = {**vars(fusedadam), **vars(ascend)}.values()
CLASSES = {
    made for made in PUBLIC if inspect.isclass(made) and issubclass(made, FusedOptimizer) and hasattr(made, "rule")
}


def averaged_scalars(lr, beta2):
    return {"lr": lr, "beta2": beta2, "beta2c": 1 - beta2}


@rule(scalars=averaged_scalars)
def averaged(param: Value, grad: Value, average: Value, *, lr: Scalar, beta2: Scalar, beta2c: Scalar) -> Values:
    average = beta2 * average + beta2c * grad
    param = param - lr * average
    return param, average


@rule(scalars=averaged_scalars)
def yogi(param: Value, grad: Value, average: Value, *, lr: Scalar, beta2c: Scalar) -> Values:
    """Never negative, which the source does not show."""
    average = average - beta2c * sign(average - grad * grad) * grad * grad
    param = param - lr * grad / (average + 0.001)
    return param, average


@rule(scalars=averaged_scalars)
def interpolated(param: Value, grad: Value, average: Value, *, lr: Scalar, beta2c: Scalar) -> Values:
    average = average + beta2c * (grad * grad - average)
    param = param - lr * grad / (average + 0.001)
    return param, average


@rule(scalars=averaged_scalars)
def summed(param: Value, grad: Value, average: TensorValue, *, lr: Scalar) -> Values:
    average = tensor_sum(grad)
    param = param - lr * grad * average
    return param, average


def define(which, signed=False):
    class Mine(FusedOptimizer):
        rule = which
        states = {"average": State(signed=signed)}
        options = OPTIONS | {"betas": checks.betas}

        def __init__(self, params, lr=0.1, betas=(0.9, 0.9), **common):
            super().__init__(params, lr=lr, betas=betas, **common)

    return Mine


def leaf():
    param = torch.nn.Parameter(torch.ones(64, 64))
    param.grad = torch.ones(64, 64)
    return param


@pytest.mark.parametrize("how", ["made", "set"])
def test_a_state_that_becomes_negative(how):
    param = leaf()
    optimizer = define(averaged)([param], storage="8bit" if how == "made" else None)
    if how == "set":
        optimizer.step()
        optimizer.param_groups[0]["storage"] = "8bit"
    before = param.detach().clone()
    with pytest.raises(ValueError, match=r"Mine.states\['average'\] has signed=False, and was -\d.* in step 1 with"):
        optimizer.step()
    assert torch.equal(param, before)


def test_a_value_by_tensor_is_never_in_8_bits():
    define(summed)([leaf()], storage="8bit", backend="eager").step()


@pytest.mark.parametrize("which", [yogi, interpolated])
@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.999])
def test_what_the_source_does_not_show(which, beta2):
    define(which)([leaf()], storage="8bit", betas=(0.9, beta2), backend="eager").step()


def test_the_default_device_is_nobodys_business():
    param = leaf()
    torch.set_default_device("meta")
    try:
        define(interpolated)([param], storage="8bit", backend="eager").step()
    finally:
        torch.set_default_device(None)


def test_who_is_not_asked():
    state = torch.random.get_rng_state()
    define(averaged, signed=True)([leaf()], storage="8bit", backend="eager").step()
    define(averaged)([leaf()], backend="eager").step()
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.filterwarnings("ignore:NpuFusedBertAdam")
@pytest.mark.parametrize("cls", sorted(CLASSES, key=lambda c: c.__name__), ids=lambda c: c.__name__)
def test_the_classes_of_this_package(cls):
    """They are not tried in a step."""
    lr = {"lr": 0.01} if inspect.signature(cls).parameters.get("lr") else {}
    optimizer = cls([torch.nn.Parameter(torch.ones(8, 8))], **lr)
    (flags,), (hyper_parameters,) = optimizer._options()[:2]
    refusals.check_signs(cls, flags, hyper_parameters)
    refusals.check_signs(cls, [not flag for flag in flags], hyper_parameters)
