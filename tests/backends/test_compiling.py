"""Kernels compile for GPUs, on machines without one. That they are right is tested by the interpreter and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from fusedadam import Adafactor, AdamP, AdamW, Muon
from fusedadam.catalog import CATALOG
from tests.backends.compiling import TARGETS, recorded
from tests.support import BF16, F32

pytest.importorskip("triton")
QUICK = {
    "AdamW": (AdamW, F32, {"max_grad_norm": 1.0}), "AdamW in 8 bits": (AdamW, BF16, {"storage": "8bit"}),
    "AdamP": (AdamP, F32, {}), "Adafactor": (Adafactor, F32, {}), "Muon in 8 bits": (Muon, BF16, {"storage": "8bit"}),
    "on the device": (AdamW, F32, {"capturable": True}),
}  # fmt: skip
EVERY = {
    f"{name} {storage}": (make, F32 if storage is None else BF16, {"storage": storage})
    for entry in CATALOG.values()
    for name, make in entry.tested.items()
    for storage in (None, "exact", "8bit")
}


def kernels_of(makers, path):
    with recorded() as found:
        for make, dtype, options in makers:
            shapes = [(64, 128), (3, 15), (4, 8, 64), (70, 36)]
            params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
            for param in params:
                param.grad = torch.ones_like(param)
            make(params, backend="triton", **options).step()
    path.write_text(json.dumps(found), encoding="utf-8")
    return len(found)


def compiles(target, makers, path):
    count = kernels_of(makers, path)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.compiling", target, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") == count > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
@pytest.mark.parametrize("name", QUICK)
def test_kernels_compile_for_an_h200(name, tmp_path):
    compiles("sm_90", [QUICK[name]], tmp_path / "kernels.json")


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_every_kind_of_device(target, name, tmp_path):
    compiles(target, [EVERY[name]], tmp_path / "kernels.json")
