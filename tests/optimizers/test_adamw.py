"""AdamW and Adam have the arguments and defaults of torch's."""

from __future__ import annotations

import inspect

import pytest
import torch

import fusedadam

OURS = {"max_grad_norm", "state_dtype", "storage", "seed", "skip_nonfinite", "backend"}
THEIRS = {"decoupled_weight_decay"}  # of torch's Adam: here it is the class that decides


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_arguments_and_defaults_are_torchs(name):
    ours, theirs = (inspect.signature(getattr(package, name)).parameters for package in (fusedadam, torch.optim))
    of_adamw = {"peak_lr", "cautious", "update_clipping"} if name == "AdamW" else set()
    assert {*ours} - {*theirs} == OURS | of_adamw
    assert {*theirs} - {*ours} <= THEIRS
    shared = [argument for argument in theirs if argument in ours]
    for argument in shared:
        assert ours[argument].default == theirs[argument].default
        assert ours[argument].kind == theirs[argument].kind


def test_a_group_that_lacks_torchs_newer_options_gets_the_defaults():
    """As saved by an earlier version."""
    optimizer = fusedadam.AdamW([torch.nn.Parameter(torch.ones(1))])
    del optimizer.param_groups[0]["maximize"], optimizer.param_groups[0]["max_grad_norm"]
    assert not optimizer.value(optimizer.param_groups[0], "maximize")
    assert not optimizer.value(optimizer.param_groups[0], "clipped")
