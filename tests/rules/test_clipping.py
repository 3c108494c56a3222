"""Clipping as a helper of rules: torch's factor, and norms over what they say."""

from __future__ import annotations

import math

import pytest
import torch

from fusedadam.rules.clipping import clip_factor, clipped_by_norm, group_norm, tensor_norm, total_norm
from tests.support import F64


@pytest.mark.parametrize("max_norm", [0.5, 5.0, float("inf")])
def test_clipped_by_norm_is_torchs_clip_grad_norm(max_norm):
    param = torch.nn.Parameter(torch.zeros(40, dtype=F64))
    param.grad = torch.linspace(-1, 1, 40, dtype=F64)
    grad, norm = clipped_by_norm(param.grad.clone(), max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(param, max_norm), rtol=1e-15, atol=0)
    torch.testing.assert_close(grad, param.grad, rtol=1e-15, atol=0)


def test_a_norm_that_is_nan_or_infinite():
    assert clip_factor(torch.tensor(float("inf")), 1.0) == 0
    assert torch.isnan(clip_factor(torch.tensor(float("nan")), 1.0))


def test_of_one_tensor_all_norms_are_the_same():
    x = torch.arange(6.0).view(2, 3)
    root = torch.tensor(math.sqrt(55.0))  # not torch's root in float32, which is off by an ulp on some processors
    assert tensor_norm(x) == group_norm(x) == total_norm(x) == root
