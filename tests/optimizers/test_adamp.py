"""AdamP: which projections it reports, and AdamW's state dicts."""

from __future__ import annotations

import torch

import fusedadam
from tests.contract.common import leaves, train


def test_projections_before_the_first_step_and_after_a_group_was_added():
    params = leaves()
    optimizer = fusedadam.AdamP(params, delta=1e6)
    assert optimizer.projections() == {}
    train(optimizer, 1)
    assert [optimizer.projections()[p] for p in params] == ["channel", "none", "channel", "none"]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})
    assert list(optimizer.projections()) == params, "the new one has taken no step"
    assert list(optimizer.projections().values()) == ["channel", "none", "channel", "none"]


def test_projections_of_named_parameters_have_their_names():
    model = torch.nn.Linear(3, 2)
    optimizer = fusedadam.AdamP(model.named_parameters(), delta=1e6)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.projections() == {"weight": "channel", "bias": "none"}


def test_a_state_dict_of_torchs_adamw_goes_on_in_adamp():
    params = leaves()
    theirs = torch.optim.AdamW(params)
    train(theirs, 3)
    ours = fusedadam.AdamP(params)
    ours.load_state_dict(theirs.state_dict())
    train(ours, 1, start=3)
    assert all(ours.state[p]["step"] == 4 for p in params)
