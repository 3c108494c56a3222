"""The sets have their sizes."""

from __future__ import annotations

import pytest
import torch

from fusedadam.cli.harness import shapes as models


@pytest.mark.parametrize(
    ("shapes", "tensors", "millions"),
    [
        (models.gpt(), 146, 124.4),
        (models.llama(), 37, 940.6),
        (models.many_small(4096), 1000, 1.0),
    ],
)
def test_a_set_has_as_many_tensors_and_parameters_as_it_says(
    shapes: list[models.Shape], tensors: int, millions: float
) -> None:
    assert len(shapes) == tensors
    assert sum(torch.Size(shape).numel() for shape in shapes) / 1e6 == pytest.approx(millions, abs=0.05)
