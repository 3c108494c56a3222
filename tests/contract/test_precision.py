"""The warning about bfloat16 parameters whose states are bfloat16, too."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import fusedadam
from fusedadam.contract import precision

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_told", [])


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


def test_a_later_group_is_seen():
    optimizer = fusedadam.AdamW([leaf(torch.float32)])
    with pytest.warns(UserWarning, match=r"state_dtype=torch\.float32, or storage="):
        optimizer.add_param_group({"params": [leaf()]})


def test_it_is_a_warning_by_default_in_a_script():
    code = "import torch, fusedadam\nfusedadam.Adam([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert "<string>:2: UserWarning: fusedadam: Adam keeps" in done.stderr
