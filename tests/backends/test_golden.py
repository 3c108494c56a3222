"""What the compilers see: the kernels of AdamW, AdamP and AdamW in 8 bits, for each backend, as they are generated, and
the kernel for AdamW's scalars on a device.

A change of the generator shows as a diff of these files:

    REWRITE_GOLDEN=1 python -m pytest tests/backends/test_golden.py
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fusedadam
from fusedadam import codegen
from fusedadam.engine.backend import ScalarLaunch
from fusedadam.engine.device_scalars import AT_F32, NUMBER
from fusedadam.engine.launch_table import STEP

FOLDER = Path(__file__).with_name("golden")
OPTIMIZERS = {
    "adamw": (fusedadam.AdamW, {}),
    "adamp": (fusedadam.AdamP, {}),
    "adamw_8bit": (fusedadam.AdamW, {"storage": "8bit"}),
}


def kernels(kind, backend, monkeypatch) -> list[str]:
    """The source of each kernel that one step over a matrix runs, in the order in which they are made."""
    made = []

    def watch(name):
        load = getattr(codegen, name)

        def watched(title, text, made_for, *name):
            made.append(text)
            return load(title, text, made_for, *name)

        monkeypatch.setattr(codegen, name, watched)

    watch("function" if backend == "numba" else "load")
    make, options = kind
    param = torch.ones(64, 64, dtype=torch.bfloat16) if "storage" in options else torch.ones(3, 4)
    param = torch.nn.Parameter(param)
    param.grad = torch.ones_like(param)
    optimizer = make([param], backend=backend, **options)
    optimizer.step()
    if backend == "eager":
        return [
            "\n\n".join(stage.functions)
            for launch in optimizer._stepper.last_plan.launches
            for stage in launch.table.specialized.stages
        ]
    return [text for text in made if "def look(" not in text and "call_with_denormals" not in text]


@pytest.mark.parametrize("backend", ["numba", "triton", "eager"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_are_as_they_were(name, backend, monkeypatch):
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("with a GPU, Triton does not run on the CPU")
    from fusedadam.backends import numba, triton

    numba._compile.cache_clear()
    triton._compile.cache_clear()
    found = "\n\n".join(
        f"# kernel {k}\n{text.rstrip()}\n" for k, text in enumerate(kernels(OPTIMIZERS[name], backend, monkeypatch), 1)
    )
    assert_as_it_was(found, FOLDER / f"{name}_{backend}.txt")


def assert_as_it_was(found, golden):
    if os.environ.get("REWRITE_GOLDEN"):
        golden.write_text(found, encoding="utf-8")
    assert found == golden.read_text("utf-8")


def test_the_kernel_for_scalars_is_as_it_was():
    """In some groups lr is a number, in others a tensor."""
    from fusedadam.backends.triton import scalars

    rule = fusedadam.AdamW.rule
    specialized = rule.specialize({"amsgrad": False, "maximize": False, "decoupled": True, "clipped": False})
    names, program = specialized.scalars, rule.scalar_program(())
    kinds = tuple((NUMBER, AT_F32) if name == "lr" else (NUMBER,) for name in program.arguments)
    fields = {name: k for k, name in enumerate((*names, STEP))}
    table = SimpleNamespace(specialized=specialized, scalars=names, fields=fields)
    counts, members, options = torch.empty(3, 0).unbind()
    launch = ScalarLaunch(table, program, kinds, counts, members, options)
    assert_as_it_was(scalars.source(launch), FOLDER / "adamw_scalars_triton.txt")
