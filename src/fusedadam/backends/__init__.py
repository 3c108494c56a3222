"""Backends run a rule over a launch table. This file chooses one for each device.

numba    a CPU
triton   CUDA; ROCm, XPU and Ascend's NPU from the same source, untested
eager    everything else, and where numba or triton is not installed (with a warning)

Each is a module with a ``BACKEND``, whose parts engine/backend.py describes: ``prepare``, ``sum_across`` and
``needs_tensors``; all others have defaults. numba and triton generate source, in files of the same names: kernel,
load_store, sums, ops. To add a backend, write a ``BACKEND``, and add its name to ``NAMES``, to ``Backend`` in
contract/declarations.py, to ``best`` for its devices, to ``why_not`` for what it requires, and to ``native_on`` of the
formats that its compiler converts; names in its source that no rule may use, to ``RESERVED`` in rules/function.py.
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
    """The backend for tensors on this device. An explicit name forces that backend or raises."""
    if wanted is not None:
        check(wanted, device)
        return _load(wanted)
    name, reason = best(device)
    if reason is not None:
        _warn(f"{reason}, so optimizers on {device.type} run eagerly, many times slower")
    return _load(name)


def best(device: torch.device) -> tuple[str, str | None]:
    """The default backend of a device, and why a faster one is unavailable."""
    name = "numba" if device.type == "cpu" else "triton" if device.type in TRITON_DEVICES else "eager"
    reason = why_not(name, device)
    return (name, None) if reason is None else ("eager", reason)


def check(wanted: str, device: torch.device | None = None) -> None:
    """Raises if an explicit ``backend=`` is not available on this machine and for this device."""
    if wanted not in NAMES:
        raise ValueError(f"backend={wanted!r} is unknown; use one of {', '.join(NAMES)}, or None to choose by device")
    reason = why_not(wanted, device)
    if reason is None:
        return
    if device is None:
        raise RuntimeError(f"backend={wanted!r} is not available: {reason}")
    others = ", ".join(repr(name) for name in NAMES if why_not(name, device) is None)
    raise RuntimeError(f"backend={wanted!r} cannot serve a parameter on {device}: {reason}; use {others} or None")


def why_not(name: str, device: torch.device | None = None) -> str | None:
    """Why a backend is not available on this machine or for this device, and what to do; None if it is."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not _installed(name):
        return f"{name} is not installed (pip install {name})"
    if name == "triton" and not interpreted and not _has_compiler():
        return "no C compiler was found, which Triton needs to launch kernels (install gcc or clang, or set CC)"
    if device is None or name == "eager":
        return None
    if name == "numba":
        return None if device.type == "cpu" else "it runs on the CPU only"
    if device.type == "cpu" and not interpreted:
        return "it needs a GPU (TRITON_INTERPRET=1, set before torch.optim is used, runs it on the CPU, slowly)"
    if device.type != "cpu" and interpreted:
        return f"TRITON_INTERPRET=1 is set, and Triton's interpreter cannot reach memory on {device}; unset it"
    return None


@functools.cache
def _load(name: str) -> Backend:
    backend: Backend = importlib.import_module(f"fusedadam.backends.{name}").BACKEND
    return backend


@functools.cache
def _installed(name: str) -> bool:
    return name == "eager" or importlib.util.find_spec(name) is not None


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)


@functools.cache
def _warn(sentence: str) -> None:
    warnings.warn(f"fusedadam: {sentence}", stacklevel=2)
