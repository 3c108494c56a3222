"""AdamW and Adam: how weights decay, and groups that say so."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

import fusedadam

CLASSES = [fusedadam.Adam, fusedadam.AdamW]
HAS_OPTION = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters  # not before torch 2.7


def trained(optimizer, steps=3):
    param = optimizer.param_groups[0]["params"][0]
    for step in range(steps):
        param.grad = torch.linspace(-1, 2, 12).view(4, 3) * (step + 1)
        optimizer.step()
    return param.detach().clone()


def leaf():
    return torch.nn.Parameter(torch.linspace(1, 3, 12).view(4, 3))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("make", CLASSES)
def test_a_group_decides_how_weights_decay(make, decoupled):
    """Adam with a group of decoupled weight decay trained with an L2 penalty."""
    by_group = make([{"params": [leaf()], "decoupled_weight_decay": decoupled}], weight_decay=0.1, lr=0.1)
    expected = trained(CLASSES[decoupled]([leaf()], weight_decay=0.1, lr=0.1))
    assert torch.equal(trained(by_group), expected)
    later = make([leaf()], weight_decay=0.1, lr=0.1)
    later.param_groups[0]["decoupled_weight_decay"] = decoupled
    assert torch.equal(trained(later), expected)
    by_keyword = make([leaf()], weight_decay=0.1, lr=0.1, decoupled_weight_decay=decoupled)
    assert torch.equal(trained(by_keyword), expected)
    if HAS_OPTION:
        theirs = getattr(torch.optim, make.__name__)
        groups = [{"params": [leaf()], "decoupled_weight_decay": decoupled}]
        torch.testing.assert_close(trained(theirs(groups, weight_decay=0.1, lr=0.1)), expected)


def test_a_peak_lr_needs_decoupled_decay():
    with pytest.raises(ValueError, match=r"peak_lr=1.0 is for decoupled weight decay"):
        fusedadam.AdamW([{"params": [leaf()], "decoupled_weight_decay": False}], peak_lr=1.0)
    with pytest.raises(TypeError, match="decoupled_weight_decay=1 must be True or False"):
        fusedadam.Adam([leaf()], decoupled_weight_decay=1)


@pytest.mark.skipif(not HAS_OPTION, reason="torch's Adam has no such option")
@pytest.mark.parametrize(("to", "since"), [(fusedadam.Adam, torch.optim.Adam), (torch.optim.Adam, fusedadam.Adam)])
@pytest.mark.parametrize("saves", ["Adam", "AdamW"])
def test_state_dicts_say_how_weights_decay_in_both_directions(to, since, saves):
    """Adam goes on as the optimizer that saved, as torch's own does."""
    package = torch.optim if since is torch.optim.Adam else fusedadam
    given = {"decoupled_weight_decay": True} if saves == "Adam" else {}
    saved = getattr(package, saves)([leaf()], weight_decay=0.1, lr=0.1, **given)
    param = torch.nn.Parameter(trained(saved))
    resumed = to([param], lr=0.5)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))  # torch's would share its tensors
    assert resumed.param_groups[0]["decoupled_weight_decay"] is True
    torch.testing.assert_close(trained(resumed), trained(saved))


def test_adamw_keeps_its_own_way():
    """As torch's does, whatever is loaded; where that would matter, loading is refused (test_mistakes.py)."""
    saved, ours = fusedadam.Adam([leaf()]), fusedadam.AdamW([leaf()])
    trained(saved, 1)
    ours.load_state_dict(saved.state_dict())
    assert ours.param_groups[0]["decoupled_weight_decay"] is True
    by_group = [fusedadam.AdamW([{"params": [leaf()], "decoupled_weight_decay": False}]) for _ in range(2)]
    trained(by_group[0], 1)
    by_group[1].load_state_dict(by_group[0].state_dict())
    assert by_group[1].param_groups[0]["decoupled_weight_decay"] is False


def test_a_group_that_lacks_torchs_newer_options_gets_the_defaults():
    """As saved by an earlier version."""
    optimizer = fusedadam.AdamW([torch.nn.Parameter(torch.ones(1))])
    del optimizer.param_groups[0]["maximize"], optimizer.param_groups[0]["max_grad_norm"]
    assert not optimizer.value(optimizer.param_groups[0], "maximize")
    assert not optimizer.value(optimizer.param_groups[0], "clipped")
