"""A step that a CUDA graph would freeze is refused. What can be captured is in tests/gpu."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from fusedadam.contract.refusals import check_may_be_captured


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "make the optimizer with capturable=True"),
        ({"capturable": True, "lr": torch.tensor(0.1)}, "lr is a tensor on the CPU"),
        ({"capturable": True}, "has no state there yet"),
    ],
)
def test_what_would_be_frozen_is_named(options, says):
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match=f"captured in a CUDA graph.*{says}"):
        check_may_be_captured(fusedadam.AdamW([param], **options))
