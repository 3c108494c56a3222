"""What an editor and `help` show of the package."""

from __future__ import annotations

import inspect
import typing

import pytest

import fusedadam
from fusedadam import backends
from fusedadam.catalog import CATALOG
from fusedadam.contract.declarations import Backend


def test_dir_shows_what_is_public_and_nothing_else():
    shown = {name for name in dir(fusedadam) if not name.startswith("_")}
    assert shown == {*fusedadam.__all__, "ascend"}
    assert all(hasattr(fusedadam, name) for name in shown)


def test_the_type_of_backend_lists_the_backends():
    assert set(typing.get_args(Backend)) == set(backends.NAMES)


@pytest.mark.parametrize("cls", [entry.cls for entry in CATALOG.values()], ids=[*CATALOG])
def test_every_option_is_named_in_the_signature_with_a_type(cls):
    parameters = inspect.signature(cls).parameters
    assert not [p.name for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert not [p.name for p in parameters.values() if p.annotation is p.empty]
    assert parameters["backend"].annotation == "Backend | None"
