"""What the documents say is executed: every block of Python, and the docstrings."""

from __future__ import annotations

import doctest
import linecache
import re
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam import clipping, functional, grouping, in_backward, schedules
from fusedadam.ascend import aclnn, apply_adam, mindspeed, operators
from fusedadam.ascend import optimizers as ascend_optimizers
from fusedadam.optimizers import (
    adadelta,
    adafactor,
    adamp,
    adamw,
    adan,
    ademamix,
    bert_adam,
    ema_adamw,
    lamb,
    lion,
    nadam,
    radam,
    rmsprop,
    sgd,
)

ROOT = Path(__file__).parents[1]


def code_blocks(name):
    """Any other way to write one would be missed, and is not used."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"^ +```|^~~~|```(py|Python)\n", text, re.MULTILINE), name
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


# Executed by another test, in its own way.
ELSEWHERE = {
    "docs/scale.md": "tests/distributed/test_scale.py",
    "docs/using-it-with.md": "tests/trainers/test_documents.py",
}
NEEDS_A_GPU = "# needs a GPU\n"


def pages():
    every = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in every)
    with_code = [name for name in names if code_blocks(name) and name not in ELSEWHERE]
    for name in with_code:
        on_gpu = any(block.startswith(NEEDS_A_GPU) for block in code_blocks(name))
        yield pytest.param(name, False, id=name)
        if on_gpu:
            yield pytest.param(name, True, id=f"{name} on a GPU", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("name", "on_gpu"), list(pages()))
def test_the_code_in_a_document_runs(name, on_gpu, tmp_path, monkeypatch):
    """In order, each block going on where the last one ended; a reader has a model and batches of their own."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    space = {
        "torch": torch,
        "model": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)),
        "batches": [torch.randn(8, 4) for _ in range(3)],
        "evaluate": lambda m: None,
    }
    for k, block in enumerate(code_blocks(name)):
        if on_gpu or not block.startswith(NEEDS_A_GPU):
            title = f"<block {k} of {name}>"  # whose source can be read, as that of a notebook's cell: rules need it
            monkeypatch.setitem(linecache.cache, title, (len(block), None, block.splitlines(True), title))
            exec(compile(block, title, "exec"), space)


def test_no_block_is_left_out():
    for name, test in ELSEWHERE.items():
        assert code_blocks(name)
        assert name.rpartition("/")[2] in (ROOT / test).read_text(encoding="utf-8")


DOCUMENTED = [
    adadelta,
    adafactor,
    adamp,
    adamw,
    bert_adam,
    clipping,
    ema_adamw,
    functional,
    in_backward,
    lamb,
    rmsprop,
    schedules,
]
DOCUMENTED += [
    grouping,
    adan,
    ademamix,
    lion,
    nadam,
    radam,
    sgd,
    aclnn,
    apply_adam,
    ascend_optimizers,
    mindspeed,
    operators,
]


@pytest.mark.parametrize("module", DOCUMENTED, ids=lambda m: m.__name__)
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(module, extraglobs={"torch": torch, "AdamW": fusedadam.AdamW})
    assert result.attempted
    assert not result.failed


def test_every_public_name_is_documented():
    for name in fusedadam.__all__:
        assert getattr(fusedadam, name).__doc__
    for name in fusedadam.functional.__all__:
        assert getattr(fusedadam.functional, name).__doc__, name
