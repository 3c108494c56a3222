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
import shutil
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
    lacking = _lacking(name)
    if lacking is not None:
        _warn(f"{lacking}, so optimizers on {device.type} run eagerly, many times slower")
        name = "eager"
    return _load(name)


def check(wanted: str, device: torch.device | None = None) -> None:
    """Whether an explicit ``backend=`` can be had, on this machine and for this device."""
    if wanted not in NAMES:
        raise ValueError(f"backend={wanted!r} is unknown; use one of {', '.join(NAMES)}, or None to choose by device")
    lacking = _lacking(wanted)
    if lacking is not None:
        raise RuntimeError(f"backend={wanted!r} cannot be had: {lacking}")
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


def _lacking(name: str) -> str | None:
    """Why a backend cannot run on this machine, and what to do about it."""
    if not _installed(name):
        return f"{name} is not installed (pip install {name})"
    if name == "triton" and os.environ.get("TRITON_INTERPRET") != "1" and not _has_compiler():
        return "no C compiler was found, which Triton needs to launch kernels (install gcc or clang, or set CC)"
    return None


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)


@functools.cache
def _warn(sentence: str) -> None:
    warnings.warn(f"fusedadam: {sentence}", stacklevel=2)
