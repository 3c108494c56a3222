"""PyTorch's own inputs for its optimizer tests, run here as they are in PyTorch: test_torch_suite.py has the rest.

Inputs that cannot apply are named below, with the reason. A new input in a later torch is run, or fails a test.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import types
import warnings
from unittest import mock

import pytest
import torch

import fusedadam
from fusedadam.catalog import CATALOG
from tests.contract.common import assert_same, leaves_of, params_of, set_grads, tensors, train
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
INFO = {info.name: info for info in inputs.optim_db if info.name in CATALOG}
assert INFO.keys() == {entry.name for entry in CATALOG.values() if entry.torch_twin}
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
if "Muon" in INFO:
    ALLOWED_HERE["only support 2D parameters"] = (
        "three dimensions are a stack of matrices, and a convolution's are rows"
    )
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
PRODUCTS = (1e-5, 2e-2)  # torch's products of matrices are in bfloat16; tests/meaning/test_muon.py has closer bounds


def tolerance(name, dtype):
    """``dtype``: the one that torch calculates in."""
    return PRODUCTS if CATALOG[name].matrices else TOLERANCES[F32 if CATALOG[name].float32_twin else dtype]


def options_of(name, device, k):
    return copy.deepcopy(configurations(name, device)[k].kwargs)


def assert_as_torch(ours, theirs, **tolerance):
    """Parameters and torch's states. Ours also count steps where torch's do not; some of torch's are in float32."""
    (params, kept), (expected, wanted) = tensors(ours), tensors(theirs)
    wanted = [{k: v for k, v in state.items() if v is not None} for state in wanted]
    for state, its in zip(kept, wanted, strict=True):
        if type(theirs).__name__ in ("Muon", "SGD"):
            state.pop("step", None)
            its.pop("step", None)  # of a state dict of ours
        if "mu_product" in its:
            state["mu_product"] = state["mu_product"].to(its["mu_product"])
    assert_same((params, kept), (expected, wanted), check_device=False, **tolerance)  # step counts may be anywhere


def both(name, device, options, dtype=F64):
    """Ours and torch's, each with parameters and options of its own."""
    makers = getattr(fusedadam, name), getattr(torch.optim, name)
    return [make(leaves_of(name, dtypes=[dtype], device=device), **copy.deepcopy(options)) for make in makers]


@EVERY
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_input_gives_the_results_of_torch(name, device, k, dtype):
    """Those that are refused are refused as torch refuses what it cannot do: when the optimizer is made."""
    configuration = configurations(name, device)[k]
    if refused(configuration):
        with pytest.raises(RuntimeError, match=refused(configuration)[0]):
            getattr(fusedadam, name)(leaves_of(name), **options_of(name, device, k))
        return
    ours, theirs = both(name, device, options_of(name, device, k), dtype)
    for optimizer in (ours, theirs):
        train(optimizer, 7)
    # torch's own bias correction is calculated in float32 with capturable
    rtol, atol = tolerance(name, F32 if configuration.kwargs.get("capturable") else dtype)
    assert_as_torch(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])  # torch's fused SGD is off by 60 ulp in float16, on a CPU
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_input_for_low_precision_is_torchs_fused_step(name, device, dtype):
    """torch calculates these in float32 only when it is fused; its own test allows 5e-3."""
    for configuration in INFO[name].optim_inputs_func(device, F16):  # with an eps that float16 can hold
        ours, theirs = both(name, device, {**configuration.kwargs, "fused": True}, dtype)
        for step in range(5):
            for optimizer in (ours, theirs):
                train(optimizer, 1, start=step)
            assert_as_torch(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            for p, q in zip(params_of(ours), params_of(theirs), strict=True):
                q.data.copy_(p)  # each step by itself: differences of rounding do not add up
                for key, value in theirs.state[q].items():
                    if value is not None:
                        value.copy_(ours.state[p][key])


@CLASSES
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_input_is_left_out(name, device):
    """What is neither run nor refused with a reason would go unnoticed, most of all when torch changes its table."""
    listed = [one.desc for one in INFO[name].optim_inputs_func(device)]
    assert len(listed) >= 5
    on = {"foreach": ("cuda",), "fused": INFO[name].supports_fused_on}
    flags = [flag for flag in INFO[name].supported_impls if device in on.get(flag, (device,))]
    wanted = {f"{device}-{name}-{desc}{more}" for desc in listed for more in ("", *(f" & {f}" for f in flags))}
    assert wanted == {one.id for one in CONFIGURATIONS if one.id.startswith(f"{device}-{name}-")}
    not_run = [one for one in configurations(name, device) if refused(one)]
    assert {flag for one in not_run for flag in refused(one)} == REFUSED.keys() & {*flags}, "a reason for nothing"
    assert len(not_run) in (0, len(listed)), "each input is run at least without the flags that are refused"


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
        rtol, atol = tolerance(name, F64)
        assert_as_torch(*optimizers, rtol=rtol, atol=atol)
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


def errors(name, device):
    return INFO[name].optim_error_inputs_func(device, F32)


def attempt(name, one):
    """As torch's own test does it: made, often without parameters, and if that is to succeed, stepped."""
    given = one.optimizer_error_input
    needs_params = given.desc in ALLOWED_HERE or one.error_on != inputs.OptimizerErrorEnum.CONSTRUCTION_ERROR
    params = leaves_of(name) if given.params is None and needs_params else given.params
    optimizer = getattr(fusedadam, name)(params, **given.kwargs)
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
    if "torch/optim" in str(caught.traceback[-1].path):  # torch's own words
        assert re.search(one.error_regex, str(caught.value))
    return "refused"


@CLASSES
@pytest.mark.parametrize("device", DEVICES)
def test_every_error_of_torchs_is_the_same_error_here(name, device):
    """Where torch refuses what works here, it works: the table above says why."""
    done = [check_error(name, one) for one in errors(name, device)]
    is_adam = name in ("Adam", "AdamW")
    assert done.count("refused") >= {"cpu": 7, "cuda": 2 * is_adam}[device]
    assert done.count("allowed") == {"cpu": 4 * is_adam, "cuda": 0}[device] + (name == "Muon")


def test_the_tables_of_errors_name_only_what_torch_has():
    descriptions = {one.optimizer_error_input.desc for name in INFO for one in errors(name, "cpu")}
    assert {*ALLOWED_HERE, *OTHERWISE_HERE} <= descriptions


def test_torchs_test_modules_were_not_really_loaded():
    """Loading them freezes torch.backends, for every later test in the process."""
    assert not any(isinstance(module, StandIn) for module in sys.modules.values())
    assert not torch.backends.flags_frozen()
