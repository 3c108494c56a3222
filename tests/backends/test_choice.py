"""Which backend serves a device, what happens where it is not installed, and what importing costs."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import fusedadam
from fusedadam import backends
from tests.support import run_program


def test_importing_brings_in_neither_numba_nor_triton():
    program = "import sys, torch, fusedadam; print(*(name in sys.modules for name in ('numba', 'triton', 'llvmlite')))"
    assert run_program(program).stdout.split() == ["False"] * 3


class FakeDevice:
    def __init__(self, kind):
        self.type = kind


@pytest.fixture
def chosen(monkeypatch):
    """The backends that were loaded, where all are installed, Triton is not interpreted, and nothing was said yet."""
    names = []
    monkeypatch.setattr(backends, "_load", names.append)
    monkeypatch.setattr(backends, "_installed", lambda name: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backends._warn.cache_clear()
    return names


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "numba"), ("cuda", "triton"), ("xpu", "triton"), ("npu", "triton"), ("mps", "eager")]
)
def test_the_device_chooses(device, name, chosen, monkeypatch):
    monkeypatch.setattr(backends, "_has_compiler", lambda: True)
    backends.choose(FakeDevice(device), None)
    assert chosen == [name]


def test_a_gpu_is_served_eagerly_where_triton_is_interpreted(chosen, monkeypatch):
    """The interpreter reads addresses as if they were the host's: a step would end the process."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.warns(UserWarning, match=r"TRITON_INTERPRET=1 is set.*unset it, so optimizers on cuda run eagerly"):
        backends.choose(FakeDevice("cuda"), None)
    assert chosen == ["eager"]


@pytest.mark.parametrize(
    ("compiler", "name"), [("gcc", "triton"), ("clang", "triton"), ("own-cc", "triton"), (None, "eager")]
)
def test_a_gpu_without_a_c_compiler_is_served_eagerly_with_a_warning(compiler, name, chosen, monkeypatch):
    """Triton compiles what launches a kernel with it; else the first step ends in a compiler's error."""
    monkeypatch.setattr(backends.shutil, "which", lambda name: name if name == compiler else None)
    monkeypatch.setenv("CC", "own-cc")
    backends._has_compiler.cache_clear()
    missing = pytest.warns(UserWarning, match="no C compiler.*install gcc or clang, or set CC.*cuda run eagerly")
    with missing if name == "eager" else contextlib.nullcontext():
        backends.choose(FakeDevice("cuda"), None)
    if name == "eager":
        with pytest.raises(RuntimeError, match=r"backend='triton' is not available: no C compiler"):
            backends.check("triton")
    assert chosen == [name]
    backends._has_compiler.cache_clear()


def test_without_numba_it_runs_eagerly_with_one_warning_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backends, "_installed", lambda name: name != "numba")
    backends._warn.cache_clear()
    param = torch.nn.Parameter(torch.ones(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            param.grad = torch.ones(3)
            optimizer = fusedadam.AdamW([param])
            optimizer.step()
    said = [str(w.message) for w in caught if "fusedadam" in str(w.message)]
    assert len(said) == 1
    assert "pip install numba" in said[0]
    assert optimizer._stepper.last_plan.launches[0].needs_tensors
    assert (param < 1).all()


def test_a_process_without_numba_or_triton_still_steps():
    """Nothing of ours imports them unasked, not even the loop that looks at tensors."""
    program = """
import sys, importlib.util, warnings
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("numba", "triton") else find(name, *a)
sys.modules["numba"] = None
warnings.simplefilter("ignore")
import torch, fusedadam
param = torch.nn.Parameter(torch.ones(3))
for _ in range(3):
    param.grad = torch.ones(3)
    optimizer = fusedadam.AdamW([param], lr=0.25)
    optimizer.step()
print(param[0].item() < 0.5)
"""
    assert run_program(program).stdout == "True\n"
