"""An optimizer is named as one of ours, or as package.module:Class; anything else is refused in one line."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest
import torch

from fusedadam import AdamW
from fusedadam.catalog import CATALOG
from fusedadam.cli import contestants
from fusedadam.cli.optimizer_names import chosen, optimizer_class, parse
from fusedadam.cli.peers import Yardstick
from tests.cli.common import THEIRS, make_package
from tests.support import F32

CLASSES = """
from fusedadam import FusedOptimizer
from fusedadam.optimizers.adamw import AdamW


class Needy(AdamW):
    def __init__(self, params, rank, *, span, lr=1e-3):
        super().__init__(params, lr=lr)


class Wrong(AdamW):
    def __init__(self, params):
        super().__init__(params, lr=-1.0)


class NoRule(FusedOptimizer):
    pass


not_a_class = AdamW([__import__("torch").nn.Parameter(__import__("torch").ones(1))])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package with optimizers, and a few that cannot be used."""
    make_package(tmp_path)
    (tmp_path / "theirs/odd.py").write_text(CLASSES)
    (tmp_path / "theirs/broken.py").write_text("import no_such_dependency\n")
    (tmp_path / "theirs/script.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "theirs/syntax.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.usefixtures("package")
def test_a_class_in_the_current_folder_is_found() -> None:
    assert parse(THEIRS) == THEIRS
    assert optimizer_class(THEIRS).__name__ == "AdaBelief"
    assert optimizer_class("AdamW") is AdamW


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Shampoo", r"not an optimizer of this package \(AdamW, .*\); for one of your own write package.module:Class"),
        ("theirs:", "for one of your own write package.module:Class"),
        (":AdaBelief", "for one of your own write package.module:Class"),
        ("nowhere:Mine", "there is no module nowhere; run this in the folder that has it, or install it"),
        ("theirs.nowhere:Mine", "there is no module theirs.nowhere; run this"),
        (
            "theirs.broken:Mine",
            "importing theirs.broken raises ModuleNotFoundError: .*'no_such_dependency'; correct",
        ),
        ("theirs.script:Mine", "importing theirs.script raises SystemExit: 3; correct it there"),
        ("theirs.syntax:Mine", "importing theirs.syntax raises SyntaxError: .*; correct it there"),
        ("theirs:Mine", "theirs has no Mine; its optimizers are AdaBelief, Lars"),
        ("theirs:sqrt", "not a class derived from fusedadam.FusedOptimizer; name one that is"),
        ("theirs:FusedOptimizer", "not a class derived from fusedadam.FusedOptimizer; name one that is"),
        ("torch.optim:AdamW", "not a class derived from fusedadam.FusedOptimizer; name one that is"),
        ("theirs.odd:not_a_class", "not a class derived from fusedadam.FusedOptimizer; name one that is"),
        ("theirs.odd:Needy", "needs more arguments than params: rank, span; give each a default value"),
        ("theirs.odd:Wrong", "cannot be made with its default values: ValueError: lr=-1.0 is out of range.*; correct"),
        ("theirs.odd:NoRule", "cannot be made with its default values: TypeError: NoRule has no rule"),
    ],
)
def test_a_bad_name_is_refused_in_one_line_that_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="^" + re.escape(repr(text))) as refused:
        parse(text)
    assert re.search(says, str(refused.value).replace("\n", "a second line"))


def test_each_name_counts_once_and_all_means_ours() -> None:
    assert chosen(["Lion", "AdamW", "Lion"]) == ["Lion", "AdamW"]
    assert chosen(["theirs:Mine", "all", "AdamW"]) == ["theirs:Mine", *CATALOG]


def test_beside_it_stands_a_known_optimizer_that_says_what_it_moves() -> None:
    assert contestants.choose("theirs:Mine", "cpu", None) == (["torch-adamw"], [])
    params = [torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(5, dtype=F32))]
    params[0].grad = torch.ones(10)
    made = contestants.make("theirs:Mine", "torch-adamw", params)
    assert isinstance(made, Yardstick)
    assert made.bytes_moved == 28 * 10, "a parameter without a gradient is left alone"
