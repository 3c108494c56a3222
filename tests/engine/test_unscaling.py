"""What a step with a GradScaler has to know besides its kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedadam.engine.launch import Amp
from fusedadam.engine.unscaling import Unscaling, _divide, _may_overlap


@pytest.mark.parametrize(
    ("spans", "answer"),
    [
        ([(0, 8), (8, 8), (16, 4)], False),
        ([(16, 4), (0, 8), (8, 8)], False),
        ([(0, 8), (7, 1)], True),
        ([(0, 100), (10, 1), (50, 1)], True),  # both inside the first
        ([(0, 100), (100, 1), (50, 1)], True),
        ([], False),
    ],
)
def test_spans_that_overlap(spans, answer):
    begins, extents = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    assert _may_overlap(begins, extents) is answer


def test_gradients_are_looked_at_again_only_if_they_moved(monkeypatch):
    grads = [torch.ones(4), torch.ones(4)]
    addresses = np.array([grad.data_ptr() for grad in grads])
    unscaling = Unscaling([0, 1], [])
    unscaling.check(grads, addresses)
    unscaling.check([None, None], addresses)  # not looked at
    unscaling.check(grads, addresses + 64)
    with pytest.raises(RuntimeError, match="share memory"):
        unscaling.check([grads[0], grads[0]], addresses[[0, 0]])
    with pytest.raises(RuntimeError, match="share memory"):  # still
        unscaling.check([grads[0], grads[0]], addresses[[0, 0]])


@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_gradient_that_kernels_do_not_see(dtype, found_inf):
    """One that is sharded differently from its parameter: they see a copy."""
    grad = torch.arange(5, dtype=dtype)
    _divide(grad, Amp(torch.tensor(4.0), None if found_inf is None else torch.tensor(found_inf)))
    assert torch.equal(grad, torch.arange(5, dtype=dtype) / (1 if found_inf else 4))
