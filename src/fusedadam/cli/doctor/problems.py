"""Known problems that follow from the facts of this machine, each with a remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fusedadam.ascend.device import VARIABLE as DEVICE_VARIABLE
from fusedadam.cli.doctor.facts import Facts
from fusedadam.codegen import cache_files
from fusedadam.contract.memory import readable
from fusedadam.tensors.cuda_driver import GRAPHS_VARIABLE

OUR_VARIABLES = (cache_files.VARIABLE, GRAPHS_VARIABLE, DEVICE_VARIABLE)
FAST = {"NUMBA_OPT": "3", "NUMBA_LOOP_VECTORIZE": "1", "NUMBA_DEBUGINFO": "0", "NUMBA_CPU_NAME": None}
LITTLE_SPACE = 64 << 20


@dataclass(frozen=True)
class Problem:
    what: str
    do: str
    serious: bool = True  # steps are wrong, slow or fail; otherwise it is only a note


def find(facts: Facts) -> list[Problem]:
    """Serious problems first."""
    found = [problem for check in CHECKS for problem in check(facts)]
    return sorted(found, key=lambda problem: not problem.serious)


def _backends(facts: Facts) -> Iterator[Problem]:
    for lacking in dict.fromkeys(d.lacking for d in facts.devices if d.lacking is not None):
        names = ", ".join(d.device for d in facts.devices if d.lacking == lacking)
        yield Problem(f"Optimizers on {names} run eagerly, many times slower.", f"The reason: {lacking}.")
    for package, error in facts.broken.items():
        yield Problem(
            f"{package} is installed but cannot be imported ({error}), so the first step fails.",
            f"Run: pip install --upgrade --force-reinstall {package}",
        )


def _gpus(facts: Facts) -> Iterator[Problem]:
    usable = any(d.device != "cpu" for d in facts.devices)
    gpus = "an NVIDIA GPU" if facts.gpus == 1 else f"{facts.gpus} NVIDIA GPUs"
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if facts.gpus and not usable:
        if hidden in ("", "-1"):
            yield Problem(f"CUDA_VISIBLE_DEVICES={hidden!r} hides {gpus}.", "Unset it to train there.", False)
        elif facts.cuda is None:
            yield Problem(
                f"The driver knows {gpus}, but this torch was built without CUDA.",
                "Install a torch with CUDA if you want to train there.",
                serious=False,
            )
        else:
            said = "; ".join(facts.complaints) or "torch does not say why"
            yield Problem(
                f"The driver knows {gpus}, but torch cannot train there: {said}.",
                f"Update the NVIDIA driver, or install a torch for an older CUDA than {facts.cuda}; in a container, "
                "pass the GPUs on (docker run --gpus all).",
            )


def _triton(facts: Facts) -> Iterator[Problem]:
    if not any(d.backend == "triton" and d.device != "cpu" for d in facts.devices):
        return
    chosen = facts.environment.get("CC")
    if chosen and shutil.which(chosen) is None:
        yield Problem(
            f"CC={chosen!r} is not a program, and Triton needs it to compile its launchers.",
            "Unset CC, or set it to a C compiler.",
        )
    if not facts.headers:
        yield Problem(
            "Python's C headers (Python.h) are missing, which Triton needs to compile its launchers.",
            "Install them: python3-dev, python3-devel, or a Python that includes them.",
        )


def _caches(facts: Facts) -> Iterator[Problem]:
    gpu = any(d.backend == "triton" for d in facts.devices)
    for cache in facts.caches:
        if cache.whose == "fusedadam" and cache.folder is None:
            do = "Unset it, or set it" if cache_files.VARIABLE in facts.environment else f"Set {cache_files.VARIABLE}"
            yield Problem(f"There is no folder to keep compiled code in: {cache.error}.", f"{do} to such a folder.")
        elif cache.error is not None and (cache.whose != "Triton" or gpu):
            variable = "TRITON_CACHE_DIR" if cache.whose == "Triton" else cache_files.VARIABLE
            yield Problem(
                f"{cache.whose}'s cache {cache.folder} {cache.error}, so every process compiles again or fails.",
                f"Set {variable} to a folder that can be written to.",
            )
        elif cache.free is not None and cache.free < LITTLE_SPACE:
            yield Problem(
                f"Only {readable(cache.free)} are left on the disk of {cache.whose}'s cache {cache.folder}.",
                f"Make room; everything in {cache.folder} may be deleted, and will be compiled again.",
            )


def _threads(facts: Facts) -> Iterator[Problem]:
    threads = facts.threads
    if threads.torch > threads.usable:
        limit = f"{threads.cores} cores" if threads.quota is None else f"{threads.quota:g} cores of a container's quota"
        yield Problem(
            f"torch uses {threads.torch} threads, but this process has {limit}, so threads wait for each other.",
            f"Set OMP_NUM_THREADS={threads.usable}, or call torch.set_num_threads({threads.usable}).",
        )
    elif threads.torch == 1 < threads.usable:
        set_to_one = " (OMP_NUM_THREADS=1 is set)" if facts.environment.get("OMP_NUM_THREADS") == "1" else ""
        yield Problem(
            f"Steps on the CPU use one thread{set_to_one}, but {threads.usable} cores are available.",
            f"Set OMP_NUM_THREADS={threads.usable}, unless other processes need the cores.",
            serious=False,
        )


def _numba(facts: Facts) -> Iterator[Problem]:
    if facts.environment.get("NUMBA_DISABLE_JIT", "0") != "0":
        yield Problem("NUMBA_DISABLE_JIT is set, but kernels must be compiled: every step fails.", "Unset it.")
    for name, value in facts.environment.items():
        if name in FAST and value != FAST[name]:
            yield Problem(f"{name} is {value}, which makes Numba's kernels slow.", f"Unset {name}.")


def _unknown_variables(facts: Facts) -> Iterator[Problem]:
    for name in facts.environment:
        if name.startswith("FUSEDADAM_") and name not in OUR_VARIABLES:
            known = f"{', '.join(OUR_VARIABLES[:-1])} and {OUR_VARIABLES[-1]}"
            yield Problem(f"{name} is set, but nothing reads it.", f"Is it misspelt? There are {known}.", False)


CHECKS: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    _backends, _gpus, _triton, _caches, _threads, _numba, _unknown_variables,
)  # fmt: skip
