"""What runs a rule over a launch table, and how one of them is chosen.

numba    a CPU
triton   CUDA; ROCm, XPU and Ascend's NPU from the same source, untested
eager    everything else, and where numba or triton is not installed (with a warning)

Each has ``prepare(table)``, which compiles whatever is needed and returns the functions that run the stages of a table,
and ``sum_across(sum, terms)`` for sums over several parameters.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import warnings

import torch

from fusedadam.engine.backend import Backend

NAMES = ("numba", "triton", "eager")
TRITON_DEVICES = ("cuda", "xpu", "npu")  # "cuda" is also what ROCm calls itself


def choose(device: torch.device, wanted: str | None) -> Backend:
    """The backend for tensors on this device; raises if the one that is wanted cannot serve it."""
    if wanted is not None:
        check(wanted, device)
        return _load(wanted)
    name, lacking = best(device)
    if lacking is not None:
        _warn(f"{lacking}, so optimizers on {device.type} run eagerly, many times slower")
    return _load(name)


def best(device: torch.device) -> tuple[str, str | None]:
    """Which backend serves a device unless another is asked for, and what a faster one lacks, if it does."""
    name = "numba" if device.type == "cpu" else "triton" if device.type in TRITON_DEVICES else "eager"
    lacking = why_not(name, device)
    return (name, None) if lacking is None else ("eager", lacking)


def check(wanted: str, device: torch.device | None = None) -> None:
    """Whether an explicit ``backend=`` can be had, on this machine and for this device."""
    if wanted not in NAMES:
        raise ValueError(f"backend={wanted!r} is unknown; use one of {', '.join(NAMES)}, or None to choose by device")
    reason = why_not(wanted, device)
    if reason is None:
        return
    if device is None:
        raise RuntimeError(f"backend={wanted!r} cannot be had: {reason}")
    others = ", ".join(repr(name) for name in NAMES if why_not(name, device) is None)
    raise RuntimeError(f"backend={wanted!r} cannot serve a parameter on {device}: {reason}; use {others} or None")


def why_not(name: str, device: torch.device | None = None) -> str | None:
    """Why a backend cannot run on this machine, or not serve this device, and what to do; None if it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not _installed(name):
        return f"{name} is not installed (pip install {name})"
    if name == "triton" and not interpreted and not _has_compiler():
        return "no C compiler was found, which Triton needs to launch kernels (install gcc or clang, or set CC)"
    if device is None or name == "eager":
        return None
    if name == "numba":
        return None if device.type == "cpu" else "it runs on the CPU alone"
    if device.type == "cpu" and not interpreted:
        return "it needs a GPU (TRITON_INTERPRET=1, set before torch.optim is used, runs it on the CPU, slowly)"
    if device.type != "cpu" and interpreted:
        return f"TRITON_INTERPRET=1 is set, and Triton's interpreter cannot reach memory on {device}; unset it"
    return None


@functools.cache
def _load(name: str) -> Backend:
    module = importlib.import_module(f"fusedadam.backends.{name}")
    return Backend(module.prepare, module.sum_across, needs_tensors=name == "eager")


@functools.cache
def _installed(name: str) -> bool:
    return name == "eager" or importlib.util.find_spec(name) is not None


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)


@functools.cache
def _warn(sentence: str) -> None:
    warnings.warn(f"fusedadam: {sentence}", stacklevel=2)
