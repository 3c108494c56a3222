"""Kernels compile for GPUs, on machines without one. That they are right is tested by the interpreter and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from fusedadam import Adafactor, AdamP, AdamW, Muon, step_in_backward
from fusedadam.catalog import CATALOG
from fusedadam.engine.device_scalars import DeviceScalars
from tests.backends.compiling import TARGETS, recorded
from tests.host_memory import pretended
from tests.support import BF16, F32

pytest.importorskip("triton")
QUICK = {
    "AdamW": (AdamW, F32, {"max_grad_norm": 1.0}), "AdamW in 8 bits": (AdamW, BF16, {"storage": "8bit"}),
    "AdamP": (AdamP, F32, {}), "Adafactor": (Adafactor, F32, {}), "Muon in 8 bits": (Muon, BF16, {"storage": "8bit"}),
}  # fmt: skip
EVERY = {
    f"{name} {storage}": (make, F32 if storage is None else BF16, {"storage": storage})
    for entry in CATALOG.values()
    for name, make in entry.tested.items()
    for storage in (None, "exact", "8bit")
}


def on_device(params, make, options):
    """Scalars are computed on the device from the second step on."""
    optimizer = make(params, backend="triton", **options)
    optimizer.step()
    for launch in optimizer._stepper.last_plan.launches:
        for steps in (None, torch.zeros(len(launch.table))):
            groups = np.zeros(len(launch.table), dtype=np.int64)
            DeviceScalars(optimizer.rule, launch.table, steps, slice(None), groups).update(
                optimizer._options().hyper_parameters
            )


def over_the_bus(params, make, options):
    with pretended():
        make(params, backend="triton", offload=True, **options).step()


def beside_the_model(params, make, options):
    model = torch.nn.ParameterList(params)
    for param in params:
        param.grad = None
    with pretended():
        optimizer = step_in_backward(model, lambda own: make(own, backend="triton", offload=True, **options))
        sum(param.sum() for param in params).backward()
        optimizer.step()


def kernels_of(makers, path, *ways):
    with recorded() as found:
        for make, dtype, options in makers:
            for way in ways:
                shapes = [(64, 128), (3, 15), (4, 8, 64), (70, 36)]
                params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
                for param in params:
                    param.grad = torch.ones_like(param)
                way(params, make, options)
    path.write_text(json.dumps(found), encoding="utf-8")
    return len(found)


def compiles(target, makers, path, *ways):
    count = kernels_of(makers, path, *ways)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.compiling", target, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") == count > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
def test_kernels_compile_for_an_h200(tmp_path):
    compiles("sm_90", QUICK.values(), tmp_path / "kernels.json", on_device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
@pytest.mark.parametrize("way", [over_the_bus, beside_the_model])
def test_kernels_for_states_in_host_memory_compile(way, tmp_path):
    compiles("sm_90", [QUICK["AdamW in 8 bits"]], tmp_path / "kernels.json", way)


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_every_kind_of_device(target, name, tmp_path):
    compiles(target, [EVERY[name]], tmp_path / "kernels.json", on_device, over_the_bus)
