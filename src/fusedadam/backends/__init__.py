"""What runs a rule over a launch table, and how one of them is chosen.

numba    a CPU
triton   CUDA; ROCm, XPU and Ascend's NPU from the same source, untested
eager    everything else, and where numba or triton is not installed (with a warning)

Each has ``prepare(table)``, which compiles whatever is needed and returns the functions that run the stages of a table,
and ``share(sum, parts)`` for sums over several parameters.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings

import torch

from fusedadam.launch import Backend

NAMES = ("numba", "triton", "eager")
TRITON_DEVICES = ("cuda", "xpu", "npu")  # "cuda" is also what ROCm calls itself


def choose(device: torch.device, wanted: str | None) -> Backend:
    """The backend for tensors on this device; raises if the one that is wanted cannot serve it."""
    if wanted is not None:
        check(wanted, device)
        return _load(wanted)
    name = "numba" if device.type == "cpu" else "triton" if device.type in TRITON_DEVICES else "eager"
    if not _installed(name):
        _warn_missing(name, device.type)
        name = "eager"
    return _load(name)


def check(wanted: str, device: torch.device | None = None) -> None:
    """Whether an explicit ``backend=`` can be had, on this machine and for this device."""
    if wanted not in NAMES:
        raise ValueError(f"backend={wanted!r} is unknown; use one of {', '.join(NAMES)}, or None to choose by device")
    if not _installed(wanted):
        raise RuntimeError(
            f"backend={wanted!r} needs the package {wanted}, which is not installed: pip install {wanted}"
        )
    if device is None or wanted == "eager":
        return
    if wanted == "numba" and device.type != "cpu":
        raise RuntimeError(
            f"backend='numba' runs on the CPU, but a parameter is on {device}; use 'triton', 'eager' or None"
        )
    if wanted == "triton":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type == "cpu" and not interpreted:
            raise RuntimeError(
                "backend='triton' needs a GPU, but a parameter is on the CPU; use 'numba', 'eager' or None "
                "(TRITON_INTERPRET=1, set before torch.optim is used, runs Triton on the CPU, slowly, for tests)"
            )
        if device.type != "cpu" and interpreted:
            raise RuntimeError(
                f"TRITON_INTERPRET=1 is set, and the interpreter cannot reach memory on {device}; unset it"
            )


@functools.cache
def _load(name: str) -> Backend:
    module = importlib.import_module(f"fusedadam.backends.{name}")
    return Backend(module.prepare, module.share, needs_tensors=name == "eager")


@functools.cache
def _installed(name: str) -> bool:
    return name == "eager" or importlib.util.find_spec(name) is not None


@functools.cache
def _warn_missing(name: str, device: str) -> None:
    warnings.warn(
        f"fusedadam: {name} is not installed, so optimizers on {device} run eagerly, many times "
        f"slower; pip install {name}",
        stacklevel=2,
    )
