"""Trainers that choose an optimizer by name: by a dotted path in YAML or TOML, or from a registry."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam.catalog import CATALOG

EXAMPLE = Path(__file__).parents[2] / "examples/chosen_by_name.py"
by_name = runpy.run_path(str(EXAMPLE))["by_name"]

TORCHTUNE = """
optimizer:
  _component_: fusedadam.AdamW
  lr: 2.0e-5
  weight_decay: 0.01
  max_grad_norm: 1.0
  storage: 8bit
"""
LIGHTNING = """
optimizer:
  class_path: fusedadam.EmaAdamW
  init_args:
    lr: 0.001
    betas: [0.9, 0.95]
    ema_decay: 0.999
"""
VERL = """
optim:
  optimizer_impl: fusedadam
  optimizer: AdamW
  lr: 1.0e-6
  betas: [0.9, 0.95]
"""
TOML = """
[optimizer]
name = "fusedadam.AdamW"
lr = 8e-4
eps = 1e-8
"""


def leaf() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(64, 64))
    param.grad = torch.ones_like(param)
    return param


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    optimizer.step()
    assert not torch.equal(before, optimizer.param_groups[0]["params"][0])
    return optimizer


@pytest.mark.parametrize(
    ("text", "section", "cls", "options"),
    [
        (TORCHTUNE, "optimizer", fusedadam.AdamW, {"lr": 2e-5, "max_grad_norm": 1.0, "storage": "8bit"}),
        (LIGHTNING, "optimizer", fusedadam.EmaAdamW, {"betas": [0.9, 0.95], "ema_decay": 0.999}),
        (VERL, "optim", fusedadam.AdamW, {"lr": 1e-6, "betas": [0.9, 0.95]}),
    ],
)
def test_yaml_names_a_class_by_its_path(text, section, cls, options):
    """Lists, which is what YAML makes of betas, are taken for tuples."""
    yaml = pytest.importorskip("yaml")
    optimizer = stepped(by_name(yaml.safe_load(text)[section], [leaf()]))
    assert type(optimizer) is cls
    assert {name: optimizer.param_groups[0][name] for name in options} == options


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_toml_names_a_class_by_its_path():
    import tomllib

    options = tomllib.loads(TOML)["optimizer"]
    optimizer = stepped(by_name({"_target_": options.pop("name"), **options}, [leaf()]))
    assert type(optimizer) is fusedadam.AdamW
    assert optimizer.defaults["lr"] == 8e-4


@pytest.mark.parametrize("name", CATALOG)
def test_options_of_a_configuration_survive_json(name):
    """A trainer that saves its configuration beside a checkpoint finds plain values in it."""
    optimizer = CATALOG[name].cls([leaf()])
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    again = json.loads(json.dumps(options))
    stepped(CATALOG[name].cls([{"params": [leaf()], **again}]))


def test_timms_registry():
    pytest.importorskip("timm")
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry

    default_registry.register(OptimInfo("fastadamw", "fusedadam.AdamW", has_betas=True))
    model = torch.nn.Linear(3, 2)
    optimizer = create_optimizer_v2(model, "fastadamw", lr=1e-3, weight_decay=0.05, betas=(0.9, 0.95))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert type(optimizer) is fusedadam.AdamW
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.05]
