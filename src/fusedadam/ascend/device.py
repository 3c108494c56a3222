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


def launched(name: str, otherwise: int) -> int:
    """A number that torchrun and other launchers of several processes leave in the environment."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def count_on_cpu() -> int:
    """How many numbers "npu" may have where it means the CPU: 1, or the number of processes on this machine.

    A script that is launched in several processes uses an NPU for each, numbered by LOCAL_RANK.
    """
    return max(launched("LOCAL_WORLD_SIZE", 1), launched("LOCAL_RANK", 0) + 1)


def require_on_cpu(number: int | str, given: Any) -> None:
    """Raises unless the CPU has this number."""
    if str(number) not in map(str, range(there := count_on_cpu())):
        names = "'npu:0'" if there == 1 else f"'npu:0' to 'npu:{there - 1}'"
        raise RuntimeError(f"{given!r} does not exist: there is one device here, the CPU, and it is {names}")


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
    """A device that torch knows, in place of "npu" or "npu:0"; anything else as it is, also numbers."""
    if not is_named(device):
        return device
    kind, number = _kind or best(), device.partition(":")[2]
    if kind == "cpu":
        if number:
            require_on_cpu(number, device)
        return kind  # a CPU has no number, and tensors on it would not be on "cpu:0"
    return f"{kind}:{number}" if number else kind


def is_meant(device: Any) -> bool:
    """Whether an argument that is a device means the one that "npu" does: by name, or on a CPU by number.

    A number alone means the accelerator, which a CPU is not to torch; on a GPU it is translated by torch.
    """
    return is_named(device) or (type(device) is int and _kind == "cpu")


def placed(device: Any) -> Any:
    """:func:`translated`, for an argument that is a device, and not a number of any other kind."""
    return translated(f"npu:{device}" if is_meant(device) and type(device) is int else device)


def translating(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with whatever it is given translated."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = {name: translated(value) for name, value in kwargs.items()}
        return function(*map(translated, args), **own)

    return call
