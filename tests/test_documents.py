"""What the documents say is executed: the worked example of CONTRIBUTING.md, the README's code, the docstrings."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import fusedadam
from fusedadam import clipping, functional, in_backward, schedules
from fusedadam.ascend import aclnn, operators
from fusedadam.ascend import optimizers as ascend_optimizers
from fusedadam.optimizers import adamp, adamw, bert_adam, ema_adamw
from tests.support import BF16, F32, F64, PLACES

ROOT = Path(__file__).parents[1]


def code_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


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


@pytest.mark.parametrize("name", ["README.md", "docs/adamp-bertadam-clipping.md", "docs/migration.md"])
def test_the_code_in_the_documents_runs(name):
    blocks = code_blocks(name)
    assert blocks
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    space = {
        "torch": torch,
        "model": model,
        "batches": [torch.randn(8, 4) for _ in range(3)],
        "evaluate": lambda m: None,
    }
    for block in blocks:
        exec(compile(block, name, "exec"), space)


DOCUMENTED = [adamp, adamw, bert_adam, clipping, ema_adamw, functional, in_backward, schedules]
DOCUMENTED += [aclnn, ascend_optimizers, operators]


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
