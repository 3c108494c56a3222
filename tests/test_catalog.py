"""The catalog: complete, true, and cheap to import."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam.catalog import CATALOG
from fusedadam.contract.base import FusedOptimizer

DOCS = Path(__file__).parents[1] / "docs/optimizers"
EVERY = pytest.mark.parametrize("entry", CATALOG.values(), ids=[*CATALOG])


def test_every_public_optimizer_has_an_entry():
    public = {name: getattr(fusedadam, name) for name in fusedadam.__all__}
    classes = {c for c in public.values() if isinstance(c, type) and issubclass(c, FusedOptimizer)}
    assert {entry.cls for entry in CATALOG.values()} == classes - {FusedOptimizer}


@EVERY
def test_an_entry_says_what_is_true(entry):
    assert (DOCS / f"{entry.page}.md").read_text("utf-8").startswith(f"# {entry.name}\n")
    assert next(iter(entry.variants)) == ""
    assert entry.when
    assert entry.because
    params = [torch.nn.Parameter(torch.ones(2, 2))]
    for make in entry.tested.values():
        assert type(make(params)) is entry.cls
    for options in (entry.usual, *entry.costs):
        assert type(entry.cls(params, **options)) is entry.cls
    assert entry.choices.keys() <= inspect.signature(entry.cls).parameters.keys()
    for peer in entry.peers:  # of other packages, tests/cli make those that are installed
        module, _, name = peer.path.partition(":")
        if module.startswith(("torch.", "fusedadam.")):
            assert callable(getattr(importlib.import_module(module), name))


def test_peers_are_not_imported():
    code = "import sys, fusedadam.catalog; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    peers = [peer for entry in CATALOG.values() for peer in entry.peers if not peer.path.startswith("torch.")]
    assert peers
    assert not {peer.path.partition(":")[0] for peer in peers} & {*loaded}


def test_a_peer_is_looked_up_by_its_package(monkeypatch):
    asked = []
    monkeypatch.setattr("importlib.util.find_spec", asked.append)
    for entry in CATALOG.values():
        assert not any(peer.installed for peer in entry.peers)
    assert {"adamp", "timm", "apex", "torch", "schedulefree", "deepspeed", "fusedadam"} <= set(asked)
    assert not [name for name in asked if not name.isidentifier()]
