"""A class declares its states and options; a declaration that does not fit the rule is refused when it is made."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from fusedadam import ascend
from fusedadam.catalog import CATALOG
from fusedadam.contract.base import FusedOptimizer
from fusedadam.contract.declarations import OPTIONS, State
from fusedadam.optimizers.adamw import adam
from fusedadam.rules.rule import Scalar, Value, rule

CLASSES = [fusedadam.AdamW, fusedadam.Adam, fusedadam.AdamP, fusedadam.BertAdam, fusedadam.EmaAdamW]
CLASSES += [ascend.NpuFusedAdamW, ascend.NpuFusedAdamP, ascend.NpuFusedBertAdam, ascend.FusedEmaAdamW]


@pytest.mark.filterwarnings("ignore:NpuFusedBertAdam. b2")
@pytest.mark.parametrize("cls", [*CLASSES, *(entry.cls for entry in CATALOG.values())])
def test_every_option_of_a_signature_has_a_check(cls):
    assert {*cls([torch.nn.Parameter(torch.ones(1, 1))]).defaults} <= {*cls.options}


@pytest.mark.parametrize("cls", CLASSES)
def test_second_moments_have_no_sign(cls):
    unsigned = {name for name, state in cls.states.items() if not state.signed}
    assert unsigned == {name for name in cls.states if name.endswith("_sq")}


def test_a_state_begins_as_zeros_or_as_a_copy_in_the_dtype_that_its_option_names():
    param, group = torch.nn.Parameter(torch.full((2,), 3.0)), {"state_dtype": None, "ema_dtype": torch.float64}
    zeros, copy = State().new(param, group), State("param", dtype_option="ema_dtype").new(param, group)
    assert torch.equal(zeros, torch.zeros(2))
    assert torch.equal(copy, torch.full((2,), 3.0, dtype=torch.float64))
    assert not copy.requires_grad


def test_states_that_are_not_the_rules_are_refused():
    with pytest.raises(TypeError, match=r"Wrong.states has exp_avg, and its rule has exp_avg, exp_avg_sq, max"):
        type("Wrong", (FusedOptimizer,), {"rule": adam, "states": {"exp_avg": State()}})


def test_what_the_rule_needs_and_nothing_gives_is_refused():
    body = {"rule": adam, "states": fusedadam.AdamW.states, "options": OPTIONS}
    with pytest.raises(TypeError, match="the rule of Wrong needs amsgrad, decoupled, eps"):
        type("Wrong", (FusedOptimizer,), body)


@pytest.mark.parametrize("name", ["float32", "torch.float32"])
def test_dtypes_may_be_named_as_configuration_files_do(name):
    first, second = (torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = fusedadam.EmaAdamW([first], state_dtype=name, ema_dtype="float64")
    optimizer.add_param_group({"params": [second], "state_dtype": "float16"})
    for param, dtype in ((first, torch.float32), (second, torch.float16)):
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.state[param]["exp_avg"].dtype == dtype
        assert optimizer.state[param]["ema_params"].dtype == torch.float64
    again = fusedadam.EmaAdamW([torch.nn.Parameter(p.detach().clone()) for p in (first, second)])
    again.param_groups[0]["state_dtype"] = name  # later, too
    again.param_groups[0]["params"][0].grad = torch.ones_like(first)
    again.step()
    assert again.state[again.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.float32
    for wrong in ("float31", "nn", "bf16"):
        with pytest.raises((TypeError, ValueError), match=r"state_dtype="):
            fusedadam.AdamW([first], state_dtype=wrong)


def test_what_comes_from_a_parameter_is_no_argument_of_scalars():
    def scalars(lr, matrix_rows):
        return {"lr": lr * matrix_rows}

    @rule(scalars=scalars)
    def scaled(param: Value, grad: Value, *, lr: Scalar) -> Value:
        param = param - lr * grad
        return param

    with pytest.raises(TypeError, match="take matrix_rows, which comes from each parameter; name it in the signature"):

        class Scaled(FusedOptimizer):
            rule, states, options = scaled, {}, OPTIONS

            def __init__(self, params, lr=1.0, **common):
                super().__init__(params, lr=lr, **common)
