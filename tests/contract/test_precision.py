"""The warning about bfloat16 parameters whose states are bfloat16, too."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import fusedadam
from fusedadam.contract import advice
from fusedadam.ops import maximum, tensor_sum

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "_told", set())


def leaf(dtype: torch.dtype = BF16, trained: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=trained)


def test_once_and_at_the_line_that_makes_the_optimizer():
    with pytest.warns(UserWarning, match="AdamW keeps the states of bfloat16 parameters in bfloat16") as caught:
        fusedadam.AdamW([leaf()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusedadam.Lion([leaf()])
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ([leaf(torch.float32)], {}),
        ([leaf(trained=False)], {}),
        ([leaf()], {"state_dtype": torch.float32}),
        ([leaf()], {"state_dtype": BF16}),
        ([leaf()], {"storage": "exact"}),
        ([{"params": [leaf()], "storage": "8bit"}], {}),
    ],
)
def test_nobody_is_warned_who_has_decided_or_has_other_parameters(params, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusedadam.AdamW(params, **options)


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("SGD", {}, None),
        ("SGD", {"momentum": 0.9}, "state_dtype"),
        ("RMSprop", {}, "state_dtype"),
        ("Adafactor", {}, "state_dtype"),
        ("EmaAdamW", {"state_dtype": torch.float32}, "ema_dtype"),
        ("EmaAdamW", {"ema_dtype": torch.float32}, "state_dtype"),
        ("EmaAdamW", {"ema_dtype": torch.float32, "state_dtype": BF16}, None),
    ],
)
def test_states_that_exist_are_what_counts(name, options, missing):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(fusedadam, name)([leaf()], **options)
    assert [f"pass {missing}=torch.float32" in str(w.message) for w in caught] == [True] * (missing is not None)


def test_a_group_decides_for_itself():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = fusedadam.SGD([leaf()])
    with pytest.warns(UserWarning, match="SGD keeps the states"):
        optimizer.add_param_group({"params": [leaf()], "momentum": 0.9})


class OneNumber(fusedadam.FusedOptimizer):
    """Its only state is a number, which is never less than float32."""

    states = {"largest": fusedadam.State(signed=False)}

    @fusedadam.rule(scalars=lambda lr: {"lr": lr})
    def rule(param: fusedadam.Value, grad: fusedadam.Value, largest: fusedadam.TensorValue, *, lr: fusedadam.Scalar):
        largest = maximum(largest, tensor_sum(grad * grad))
        param = param - lr * grad / largest
        return param, largest

    def __init__(self, params, lr=0.1, **common):
        super().__init__(params, lr=lr, **common)


def test_a_state_by_tensor_is_wide():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OneNumber([leaf()])


def test_a_lazy_parameter_counts_as_having_all_states():
    with pytest.warns(UserWarning, match="AdamW keeps the states"):
        fusedadam.AdamW(torch.nn.LazyLinear(3, dtype=BF16).parameters())


def test_a_later_group_is_seen():
    optimizer = fusedadam.AdamW([leaf(torch.float32)])
    with pytest.warns(UserWarning, match=r"state_dtype=torch\.float32, or storage="):
        optimizer.add_param_group({"params": [leaf()]})


def test_it_is_a_warning_by_default_in_a_script():
    code = "import torch, fusedadam\nfusedadam.Adam([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert "<string>:2: UserWarning: fusedadam: Adam keeps" in done.stderr
