"""PyTorch's own inputs for its optimizer tests: those for Adam and AdamW run here as they do in PyTorch.

Inputs that cannot apply are named below, with the reason. A new input in a later torch is run, or fails a test.
"""

from __future__ import annotations

import copy
import importlib
import sys
import types
import warnings
from unittest import mock

import pytest
import torch

import fusedadam
from tests.contract.common import assert_same, leaves, params_of, set_grads, train
from tests.support import BF16, F16, F32, F64

MODULE = "torch.testing._internal.common_optimizers"


class StandIn(types.ModuleType):
    """For modules that only run torch's own tests: they need more packages, and switch global flags of torch."""

    def __getattr__(self, name):
        return object if name == "_TestParametrizer" else mock.MagicMock()


def load_inputs():
    needed = [f"torch.testing._internal.common_{n}" for n in ("device_type", "methods_invocations", "utils")]
    with mock.patch.dict(sys.modules, {name: StandIn(name) for name in needed}):
        return importlib.import_module(MODULE)


inputs = load_inputs()
INFO = {info.name: info for info in inputs.optim_db if info.name in ("Adam", "AdamW")}
CLASSES = pytest.mark.parametrize("name", INFO)
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]

# options that torch has and ours refuses, by name
REFUSED = {"differentiable": "the step is fused and in place, so it cannot be differentiated through"}

# errors of torch's that ours does not raise, by what torch says about the input
ALLOWED_HERE = {
    "lr as Tensor doesn't work with foreach & not capturable": "foreach chooses nothing here; a tensor lr is read",
    "betas must be either both floats or both Tensors": "each is read as a number of its own",
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": "foreach chooses nothing here",
}
# errors of another type, by what torch says about the input
OTHERWISE_HERE = {
    "a param group cannot have duplicate parameters": (ValueError, "torch warns that it will be an error; here it is"),
}


def configurations(name, device):
    """Every input with every choice of foreach, fused and differentiable that torch tests."""
    return inputs._get_optim_inputs_including_global_cliquey_kwargs(device, None, INFO[name])


def refused(configuration):
    return [flag for flag in REFUSED if configuration.kwargs.get(flag)]


def parametrized(device, *marks):
    return [
        pytest.param(name, device, k, id=f"{device}-{name}-{one.desc}", marks=marks)
        for name in INFO
        for k, one in enumerate(configurations(name, device))
    ]


CONFIGURATIONS = [*parametrized("cpu"), *parametrized("cuda", pytest.mark.gpu)]
EVERY = pytest.mark.parametrize(("name", "device", "k"), CONFIGURATIONS)
TOLERANCES = {F64: (1e-10, 1e-12), F32: (1e-5, 1e-6)}


def options_of(name, device, k):
    return copy.deepcopy(configurations(name, device)[k].kwargs)


def both(name, device, options, dtype=F64):
    """Ours and torch's, each with parameters and options of its own."""
    makers = getattr(fusedadam, name), getattr(torch.optim, name)
    return [make(leaves(dtypes=[dtype], device=device), **copy.deepcopy(options)) for make in makers]


@EVERY
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_input_gives_the_results_of_torch(name, device, k, dtype):
    """Those that are refused are refused as torch refuses what it cannot do: when the optimizer is made."""
    configuration = configurations(name, device)[k]
    if refused(configuration):
        with pytest.raises(RuntimeError, match=refused(configuration)[0]):
            getattr(fusedadam, name)(leaves(), **options_of(name, device, k))
        return
    ours, theirs = both(name, device, options_of(name, device, k), dtype)
    for optimizer in (ours, theirs):
        train(optimizer, 7)
    # with capturable, torch's own bias correction is calculated in float32
    rtol, atol = TOLERANCES[F32 if configuration.kwargs.get("capturable") else dtype]
    assert_same(ours, theirs, rtol=rtol, atol=atol, check_device=False)  # of the step counts


@CLASSES
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_input_for_low_precision_is_torchs_fused_step(name, device, dtype):
    """torch calculates these in float32 only when it is fused; its own test allows 5e-3."""
    for configuration in INFO[name].optim_inputs_func(device, F16):  # with an eps that float16 can hold
        ours, theirs = both(name, device, {**configuration.kwargs, "fused": True}, dtype)
        for step in range(5):
            for optimizer in (ours, theirs):
                train(optimizer, 1, start=step)
            assert_same(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-6, check_device=False)
            for p, q in zip(params_of(ours), params_of(theirs), strict=True):
                q.data.copy_(p)  # each step by itself: differences of rounding do not add up
                for key, value in ours.state[p].items():
                    theirs.state[q][key].copy_(value)


@CLASSES
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_input_is_left_out(name, device):
    """What is neither run nor refused with a reason would go unnoticed, most of all when torch changes its table."""
    listed = [one.desc for one in INFO[name].optim_inputs_func(device)]
    assert len(listed) >= {"cpu": 5, "cuda": 10}[device]
    flags = [flag for flag in INFO[name].supported_impls if flag != "foreach" or device != "cpu"]
    wanted = {f"{device}-{name}-{desc}{more}" for desc in listed for more in ("", *(f" & {f}" for f in flags))}
    assert wanted == {one.id for one in CONFIGURATIONS if one.id.startswith(f"{device}-{name}-")}
    not_run = [one for one in configurations(name, device) if refused(one)]
    assert {flag for one in not_run for flag in refused(one)} == REFUSED.keys(), "a reason for what is not there"
    assert len(not_run) == len(listed), "each input is run at least without the flags that are refused"


@CLASSES
@pytest.mark.parametrize("device", DEVICES)
def test_torchs_lists_of_schedulers_steer_both_alike(name, device):
    for makers in INFO[name].scheduler_inputs:
        optimizers = both(name, device, {"lr": 0.1})
        steered = [(optimizer, [make(optimizer) for make in makers]) for optimizer in optimizers]
        for step in range(12):
            for optimizer, schedulers in steered:
                train(optimizer, 1, start=step)
                for scheduler in schedulers:
                    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(*([1.0] if plateau else []))
        assert_same(*optimizers, rtol=1e-10, atol=1e-12)
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


def errors(name, device):
    return INFO[name].optim_error_inputs_func(device, F32)


def attempt(name, one):
    """As torch's own test does it: made, and if that is to succeed, stepped."""
    params = one.optimizer_error_input.params
    optimizer = getattr(fusedadam, name)(leaves() if params is None else params, **one.optimizer_error_input.kwargs)
    if one.error_on != inputs.OptimizerErrorEnum.CONSTRUCTION_ERROR:
        set_grads(params_of(optimizer), 0)
        optimizer.step()
    return optimizer


def check_error(name, one):
    desc = one.optimizer_error_input.desc
    if desc in ALLOWED_HERE:
        train(attempt(name, one), 1)
        return "allowed"
    error, _ = OTHERWISE_HERE.get(desc, (one.error_type, ""))
    if issubclass(error, Warning):
        with pytest.warns(error, match=one.error_regex):
            attempt(name, one)
        return "warned"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error) as caught:
            attempt(name, one)
    assert caught.type is error or desc in OTHERWISE_HERE
    return "refused"


@CLASSES
@pytest.mark.parametrize("device", DEVICES)
def test_every_error_of_torchs_is_the_same_error_here(name, device):
    """Where torch refuses what works here, it works: the table above says why."""
    done = [check_error(name, one) for one in errors(name, device)]
    assert done.count("refused") == {"cpu": 8, "cuda": 2}[device]
    assert done.count("allowed") == {"cpu": 4, "cuda": 0}[device]


@CLASSES
def test_the_tables_of_errors_name_only_what_torch_has(name):
    descriptions = {one.optimizer_error_input.desc for one in errors(name, "cpu")}
    assert {*ALLOWED_HERE, *OTHERWISE_HERE} <= descriptions


def test_torchs_test_modules_were_not_really_loaded():
    """Loading them freezes torch.backends, for every later test in the process."""
    assert not any(isinstance(module, StandIn) for module in sys.modules.values())
    assert not torch.backends.flags_frozen()
