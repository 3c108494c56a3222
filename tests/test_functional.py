"""The operators: one step on tensors that the caller holds."""

import pytest
import torch

from fusedadam import functional

ADAM = ("param", "grad", "exp_avg", "exp_avg_sq")


def roles(*names):
    return {name: torch.full((3,), 0.5) for name in names}


def test_what_is_written_counts_as_changed_and_the_gradient_does_not():
    own = roles(*ADAM)
    functional.adamw_(**own, step=1)
    assert [own[name]._version for name in ADAM] == [1, 0, 1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"exp_avg": [torch.zeros(3)]}, "exp_avg must be what param is: one tensor"),
        ({"grad": 1.0}, "grad is a float; it must be a torch.Tensor or a list of them"),
        ({"step": 0}, "the first step is 1"),
        ({"step": [1, 2]}, "give one step, or one for each"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change, says):
    own = {**roles(*ADAM), "step": 1, **change}
    with pytest.raises((TypeError, ValueError), match=says):
        functional.adamw_(**own)
    assert torch.equal(own["param"], torch.full((3,), 0.5))
