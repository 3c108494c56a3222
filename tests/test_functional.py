"""The operators: one step on tensors that the caller holds."""

import pytest
import torch

import fusedadam
from fusedadam import functional

ADAM = ("param", "grad", "exp_avg", "exp_avg_sq")


def roles(*names, value=0.5):
    return {name: torch.full((3,), value) for name in names}


def test_operators_take_one_step_for_each_tensor():
    """A list of steps once gave every tensor the first one's."""
    together, apart = ([[torch.full((3,), 0.5) for _ in range(2)] for _ in range(4)] for _ in range(2))
    functional.adamw_(*together, step=[1, torch.tensor([50])])
    for k, step in enumerate((1, 50)):
        functional.adamw_(*(role[k] for role in apart), step=step)
    torch.testing.assert_close(together, apart, rtol=0, atol=0)
    assert not torch.equal(*together[0])


def test_an_operator_takes_the_step_of_the_optimizer():
    own = roles(*ADAM) | roles("exp_avg", "exp_avg_sq", value=0.0)
    param = torch.nn.Parameter(own["param"].clone())
    param.grad = own["grad"].clone()
    fusedadam.AdamW([param], lr=0.1, weight_decay=0.2).step()
    functional.adamw_(**own, step=1, lr=0.1, weight_decay=0.2)
    assert torch.equal(own["param"], param)


def test_the_average_follows_the_new_parameter():
    own = roles(*ADAM, "ema")
    functional.ema_adam_(**own, step=1, ema_decay=0.0)
    assert torch.equal(own["ema"], own["param"])


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
