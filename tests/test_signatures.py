"""The recorded arguments of optimizers, as they were: those by position in order, and each with its type and default.

After a change that is meant, or to record a new optimizer's:

    REWRITE_SIGNATURES=1 python -m pytest tests/test_signatures.py
"""

from __future__ import annotations

import inspect
import os
import pydoc
import typing
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam.catalog import CATALOG

RECORDED = Path(__file__).with_name("signatures.txt")
EVERY = pytest.mark.parametrize("cls", [entry.cls for entry in CATALOG.values()], ids=[*CATALOG])


def written(cls) -> str:
    """One line; arguments by keyword have no order."""
    every = inspect.signature(cls).parameters.values()
    texts = {p.name: f"{p.name}: {p.annotation}" + ("" if p.default is p.empty else f" = {p.default!r}") for p in every}
    by_position = [texts[p.name] for p in every if p.kind is p.POSITIONAL_OR_KEYWORD]
    return f"{cls.__name__}({', '.join([*by_position, '*', *sorted({*texts.values()} - {*by_position})])})\n"


def test_every_recorded_signature_is_as_it_was():
    found = "".join(written(CATALOG[name].cls) for name in sorted(CATALOG))
    if os.environ.get("REWRITE_SIGNATURES"):
        RECORDED.write_text(found, encoding="utf-8")
    assert not {*RECORDED.read_text("utf-8").splitlines()} - {*found.splitlines()}


@EVERY
def test_the_class_its_init_and_help_show_the_same(cls):
    _, *of_init = inspect.signature(cls.__init__).parameters.values()
    parameters = inspect.signature(cls).parameters
    assert of_init == [*parameters.values()]
    assert all(f"{name}:" in pydoc.render_doc(cls).partition("Method resolution")[0] for name in parameters)
    assert typing.get_type_hints(cls.__init__).keys() == {*parameters, "return"}


@EVERY
def test_groups_have_every_argument_with_its_default(cls):
    parameters = inspect.signature(cls).parameters.values()
    optimizer = cls([torch.nn.Parameter(torch.ones(2, 2))])
    expected = {p.name: p.default for p in parameters if p.name != "params"}
    assert optimizer.defaults == expected


@EVERY
@pytest.mark.parametrize("name", ["weight_decy", "train_mode", "fused", "maximize", "peak_lr"])
def test_an_argument_that_it_does_not_have(cls, name):
    if name in inspect.signature(cls).parameters:
        return
    with pytest.raises(TypeError, match=rf"^{cls.__name__}.__init__\(\) got an unexpected keyword argument '{name}'"):
        cls([torch.nn.Parameter(torch.ones(2))], **{name: True})


def test_a_mixin_between_a_class_and_its_base_is_initialized():
    class Log(fusedadam.FusedOptimizer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.log = [options["lr"]]

    class LoggedAdam(fusedadam.Adam, Log):
        pass

    assert LoggedAdam([torch.nn.Parameter(torch.ones(2))], 0.5).log == [0.5]
