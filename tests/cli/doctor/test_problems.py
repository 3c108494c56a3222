"""Each problem that it knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusedadam.cli.doctor.facts import Cache, Device, Facts, Threads
from fusedadam.cli.doctor.problems import find

CPU = Device("cpu", "a processor", "numba", {"triton": "it needs a GPU", "eager": "slower"}, None, True)
GPU = Device("cuda:0", "NVIDIA H200", "triton", {}, None, True)
FINE = Facts(
    fusedadam="0.1.0",
    location="/here",
    python="3.12.0",
    system="Linux x86_64",
    versions={"torch": "2.13.0+cpu", "numpy": "2.4.6", "numba": "0.68.1", "triton": None},
    broken={},
    devices=[CPU],
    gpus=0,
    cuda=None,
    complaints=[],
    threads=Threads(torch=8, cores=8, quota=None, team=True),
    caches=[Cache("fusedadam", "/home/me/.cache/fusedadam", 3, 1000, free=1 << 40)],
    headers=True,
)
EAGER = replace(CPU, backend="eager", lacking="numba is not installed (pip install numba)")
NO_FOLDER = Cache("fusedadam", None, error="none could be written to")
ON_GPU = {"devices": [CPU, GPU], "gpus": 1, "cuda": "13.0"}


def cached(**what: object) -> list[Cache]:
    return [replace(FINE.caches[0], **what)]  # type: ignore[arg-type]


SERIOUS = {
    "numba is missing": ({"devices": [EAGER]}, "cpu run eagerly", "pip install numba"),
    "numba cannot be imported": ({"broken": {"numba": "ImportError: needs NumPy 2.3"}}, "NumPy 2.3", "pip install"),
    "the driver is too old": (
        {"gpus": 2, "cuda": "13.0", "complaints": ["The NVIDIA driver on your system is too old"]},
        "2 NVIDIA GPUs, but torch cannot train there: The NVIDIA driver",
        "Update the NVIDIA driver",
    ),
    "no C headers": ({**ON_GPU, "headers": False}, "Python.h", "python3-dev"),
    "CC is no compiler": ({**ON_GPU, "environment": {"CC": "/no/such/cc"}}, "/no/such/cc", "Unset CC"),
    "no folder": ({"caches": [NO_FOLDER]}, "no folder", "FUSEDADAM_CACHE_DIR"),
    "a folder that cannot be written": ({"caches": cached(error="cannot be written to")}, "cannot be", "FUSEDADAM_C"),
    "the disk is full": ({"caches": cached(free=1 << 20)}, "1.0 MiB are left", "Make room"),
    "more threads than cores": ({"threads": Threads(8, 2, None, True)}, "2 cores", "OMP_NUM_THREADS=2"),
    "more threads than quota": ({"threads": Threads(8, 8, 1.5, True)}, "1.5 cores", "OMP_NUM_THREADS=2"),
    "nothing is compiled": ({"environment": {"NUMBA_DISABLE_JIT": "1"}}, "NUMBA_DISABLE_JIT", "Unset"),
    "no optimisation": ({"environment": {"NUMBA_OPT": "1"}}, "NUMBA_OPT is 1", "Unset NUMBA_OPT"),
    "debug information": ({"environment": {"NUMBA_DEBUGINFO": "1"}}, "NUMBA_DEBUGINFO is 1", "Unset"),
    "another processor": ({"environment": {"NUMBA_CPU_NAME": "generic"}}, "NUMBA_CPU_NAME is generic", "Unset"),
}
NOTES = {
    "one thread": ({"threads": Threads(1, 4, None, True)}, "use one thread", "OMP_NUM_THREADS=4"),
    "hidden GPUs": ({"gpus": 1, "environment": {"CUDA_VISIBLE_DEVICES": ""}}, "hides an NVIDIA GPU", "Unset"),
    "torch without CUDA": ({"gpus": 4}, "4 NVIDIA GPUs, but this torch was built without CUDA", "Install a torch"),
    "misspelt": ({"environment": {"FUSEDADAM_CACHE": "x"}}, "nothing reads it", "FUSEDADAM_CACHE_DIR"),
}


@pytest.mark.parametrize("name", [*SERIOUS, *NOTES])
def test_each_problem_is_found_with_what_to_do(name: str) -> None:
    changed, what, do = {**SERIOUS, **NOTES}[name]
    (problem,) = find(replace(FINE, **changed))  # type: ignore[arg-type]
    assert what in problem.what
    assert do in problem.do
    assert problem.serious is (name in SERIOUS)


@pytest.mark.parametrize(
    "changed",
    [{}, ON_GPU, {"threads": Threads(2, 8, 2.0, True)}, {"environment": {"FUSEDADAM_CUDA_GRAPHS": "0"}}],
    ids=str,
)
def test_where_nothing_is_wrong_nothing_is_found(changed: dict[str, object]) -> None:
    assert find(replace(FINE, **changed)) == []  # type: ignore[arg-type]
