"""What a step takes from the groups, and when it makes another plan."""

from __future__ import annotations

import torch

import fusedadam
from tests.engine.test_regressions import trained


def test_a_parameter_moved_to_another_group_takes_that_groups_options():
    """The order of all parameters did not change, and with it nothing that was looked at."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = fusedadam.AdamW(
        [{"params": params[:1], "lr": 0.0}, {"params": params[1:], "lr": 1.0}], weight_decay=0.0
    )
    for p in params:
        p.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    before = params[1].item()
    optimizer.step()
    assert params[1].item() == before


def test_parameters_as_a_tuple():
    params, optimizer = trained()
    optimizer.param_groups[0]["params"] = tuple(params)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2
