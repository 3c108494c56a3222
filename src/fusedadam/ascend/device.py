"""What "npu" means here: a GPU if there is one, else the CPU, or what was chosen."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "FUSEDADAM_DEVICE"  # so that processes which a script starts choose as it did

_kind: str | None = None  # while installed
_names: set[str] = set()  # what is translated: npu; cuda as well after torch_npu.contrib.transfer_to_npu on a CPU


def best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def kind() -> str:
    """The type of the device that is meant: "cuda", "cpu", ..."""
    return _kind or best()


def chosen(device: str | None) -> str:
    """The kind of device to use, from an argument or the environment; raises if it is not there."""
    wanted, source = (device, "device") if device is not None else (os.environ.get(VARIABLE), VARIABLE)
    if not wanted:
        return best()
    if ":" in wanted:
        raise ValueError(
            f"{source}={wanted!r} must be a kind of device without a number, such as 'cuda' or 'cpu'; "
            "CUDA_VISIBLE_DEVICES chooses among several GPUs"
        )
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{source}={wanted!r} cannot be had here ({reason}); use {best()!r} or leave it out") from None
    return torch.device(wanted).type


def begin(kind: str) -> None:
    global _kind
    _kind = kind
    _names.add("npu")


def end() -> None:
    global _kind
    _kind = None
    _names.clear()


def installed() -> bool:
    return _kind is not None


def also_translate(name: str) -> None:
    _names.add(name)


def is_named(device: Any) -> bool:
    """Whether this is the name of a device that is to be translated."""
    return isinstance(device, str) and device.partition(":")[0] in _names


def translated(device: Any) -> Any:
    """A device that torch knows, in place of "npu" or "npu:0"; anything else as it is."""
    if not is_named(device):
        return device
    kind, number = _kind or best(), device.partition(":")[2]
    if kind == "cpu":
        if number not in ("", "0"):
            raise RuntimeError(f"{device!r} does not exist: there is one device here, the CPU, and it is 'npu:0'")
        return kind  # a CPU has no number, and tensors on it would not be on "cpu:0"
    return f"{kind}:{number}" if number else kind


def translating(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with whatever it is given translated."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = {name: translated(value) for name, value in kwargs.items()}
        return function(*map(translated, args), **own)

    return call
