"""What the documents say is executed: every block of Python, the worked example of CONTRIBUTING.md, the docstrings."""

from __future__ import annotations

import doctest
import importlib.util
import linecache
import re
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam import clipping, functional, in_backward, schedules
from fusedadam.ascend import aclnn, apply_adam, mindspeed, operators
from fusedadam.ascend import optimizers as ascend_optimizers
from fusedadam.optimizers import adadelta, adamp, adamw, bert_adam, ema_adamw, lamb, rmsprop, sgd
from tests.support import BF16, F32, F64, PLACES

ROOT = Path(__file__).parents[1]


def code_blocks(name):
    """Any other way to write one would be missed, and is not used."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"^ +```|^~~~|```(py|Python)\n", text, re.MULTILINE), name
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def lion(tmp_path):
    (source,) = code_blocks("CONTRIBUTING.md")
    path = tmp_path / "lion.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("lion", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Lion


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "state_dtype"), [(F64, None), (F32, None), (BF16, F32)], ids=str)
def test_the_worked_example_is_lion_on_every_backend(lion, place, dtype, state_dtype):
    device, backend = place
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(50, 50, generator=generator).to(device, dtype))
    optimizer = lion([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, state_dtype=state_dtype, backend=backend)
    p, m = param.detach().cpu().double().clone(), torch.zeros(50, 50, dtype=F64)
    for _ in range(5):
        grad = torch.randn(50, 50, generator=generator).to(dtype)
        param.grad = grad.to(device)
        optimizer.step()
        g = grad.double()
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        if dtype == BF16:
            p = p.to(BF16).double()  # stored in between, as the parameter is
    tolerance = {F64: 1e-13, F32: 1e-5, BF16: 1e-2}[dtype]
    torch.testing.assert_close(param.detach().cpu().double(), p, rtol=tolerance, atol=tolerance)


def test_the_worked_example_checks_its_options(lion):
    with pytest.raises(ValueError, match="betas"):
        lion([torch.nn.Parameter(torch.zeros(1))], betas=(0.9, 1.5))
    optimizer = lion([torch.nn.Parameter(torch.zeros(1))])
    type(optimizer)([torch.nn.Parameter(torch.zeros(1))], **optimizer.defaults)


# Executed by another test, in its own way.
ELSEWHERE = {
    "CONTRIBUTING.md": "tests/test_documents.py",
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


DOCUMENTED = [adadelta, adamp, adamw, bert_adam, clipping, ema_adamw, functional, in_backward, lamb, rmsprop, schedules]
DOCUMENTED += [sgd, aclnn, apply_adam, ascend_optimizers, mindspeed, operators]


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
