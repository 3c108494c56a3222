"""A key of a group that is nearly an option is warned of; other keys belong to whoever put them there."""

from __future__ import annotations

import warnings

import pytest
import torch

import fusedadam
from fusedadam.contract import advice

PUBLIC = [getattr(fusedadam, name) for name in fusedadam.__all__]
CLASSES = [c for c in PUBLIC if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and hasattr(c, "rule")]
# of torch's schedulers and averages, timm, detectron2, fairseq, Megatron, transformers and others
OTHERS = [
    "name", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "lr_scale", "lr_mult",
    "wd_mult", "decay_mult", "group_name", "is_expert", "wd_scale", "layer_id", "use_muon", "meta", "lr_ratio",
    "scheduler_step", "clip_norm", "warmup_steps", "no_decay", "lr_decay", "weight_decay_mult", "start_lr", "end_lr",
    "base_lr", "d", "d0", "k", "r", "rank", "scale", "proj_type", "update_proj_gap", "is_decoupled_lr",
    "default_config",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _warnings_again(monkeypatch):
    monkeypatch.setattr(advice, "_told", set())


def param():
    return torch.nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("weight_decy", "weight_decay"), ("weigth_decay", "weight_decay"), ("weight-decay", "weight_decay"),
        ("weightdecay", "weight_decay"), ("weight_decay_", "weight_decay"), ("LR", "lr"), ("beta", "betas"),
        ("bteas", "betas"), ("max_gradnorm", "max_grad_norm"), ("max_norm_grad", "max_grad_norm"),
        ("amsgard", "amsgrad"), ("Eps", "eps"), ("storge", "storage"), ("state_dype", "state_dtype"),
    ],
)  # fmt: skip
def test_a_misspelt_option_is_named(key, option):
    says = f"a group of AdamW has '{key}', which is not an option and has no effect; did you mean '{option}'"
    with pytest.warns(UserWarning, match=says) as caught:
        optimizer = fusedadam.AdamW([{"params": [param()], key: 0.1}])
    assert [warning.filename for warning in caught] == [__file__]
    assert optimizer.param_groups[0][key] == 0.1


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_what_others_keep_in_groups_is_not_warned_of(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = cls([{"params": [param()], **dict.fromkeys(other for other in OTHERS if other not in cls.options)}])
        optimizer.add_param_group({"params": [param()], 7: "seven"})
        cls([{"params": [("name", param())]}])  # torch adds param_names


def test_no_option_is_a_misspelling_of_another():
    """Of any optimizer: groups that are written for one are often given to another."""
    every = {option for cls in CLASSES for option in cls.options}
    assert not [(a, b) for a in every for b in every if a != b and advice._is_misspelt(a, b)]


def test_it_is_said_once_for_each_optimizer():
    groups = [{"params": [param()], "betaz": 1}, {"params": [param()], "betaz": 2}]
    with pytest.warns(UserWarning, match="of AdamW has 'betaz'") as caught:
        fusedadam.AdamW(groups)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="of Lion has 'betaz'"):
        fusedadam.Lion([{"params": [param()], "betaz": 1}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusedadam.AdamW([{"params": [param()], "betaz": 1}])


def test_a_group_that_is_added_later():
    optimizer = fusedadam.AdamW([param()])
    with pytest.warns(UserWarning, match="did you mean 'weight_decay'"):
        optimizer.add_param_group({"params": [param()], "weight_decays": 0.1})
