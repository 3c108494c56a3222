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
        (models.resnet(), 97, 18.1),
        (models.many_small(4096), 1000, 1.0),
    ],
)
def test_a_set_has_as_many_tensors_and_parameters_as_it_says(
    shapes: list[models.Shape], tensors: int, millions: float
) -> None:
    assert len(shapes) == tensors
    assert sum(torch.Size(shape).numel() for shape in shapes) / 1e6 == pytest.approx(millions, abs=0.05)


def test_the_resnet_is_one() -> None:
    kernels = {shape[2:] for shape in models.resnet() if len(shape) == 4}
    assert kernels == {(1, 1), (3, 3), (7, 7)}
    assert sum(len(shape) == 1 for shape in models.resnet()) == 64
