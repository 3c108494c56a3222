"""Optimizers with the name of one of torch's take its arguments and group options, with the same defaults."""

from __future__ import annotations

import inspect

import pytest
import torch

import fusedadam
from fusedadam import OPTIONS
from fusedadam.catalog import CATALOG

NAMES = [entry.name for entry in CATALOG.values() if entry.torch_twin]
OURS = {*OPTIONS, "peak_lr"}
OWN = {
    "AdamW": {"cautious", "update_clipping", "decoupled_weight_decay"},
    "Adam": {"decoupled_weight_decay"},  # which torch 2.6 does not have
    "Muon": {"use_muon", "betas"},
}


def of_both(name):
    return [getattr(package, name) for package in (fusedadam, torch.optim)]


def test_the_names():
    assert {"Adafactor", "Adam", "AdamW", "SGD"} < {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_defaults(name):
    ours, theirs = (inspect.signature(made).parameters for made in of_both(name))
    assert {*theirs} <= {*ours}, "an argument of torch's is missing"
    assert [ours[argument].default for argument in theirs] == [theirs[argument].default for argument in theirs]
    assert [ours[argument].kind for argument in theirs] == [theirs[argument].kind for argument in theirs]
    positional = [[n for n, p in every.items() if p.kind is p.POSITIONAL_OR_KEYWORD] for every in (ours, theirs)]
    assert positional[0] == positional[1]
    assert {*ours} - {*theirs} - OURS <= OWN.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_options_of_groups(name):
    """What is no option here would be kept without a word, and ignored."""
    ours, theirs = (made([torch.nn.Parameter(torch.ones(2, 2))]) for made in of_both(name))
    expected = {option: value for option, value in theirs.param_groups[0].items() if option != "params"}
    assert {option: ours.param_groups[0].get(option, "missing") for option in expected} == expected
    assert {*expected} <= {*ours.options}
    saved = ours.state_dict()["param_groups"][0]
    assert {option: saved.get(option, "missing") for option in expected} == expected
