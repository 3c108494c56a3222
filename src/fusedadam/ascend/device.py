"""The device that "npu" means: the chosen one, else a GPU if there is one, else the CPU. Translates device names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "FUSEDADAM_DEVICE"  # child processes of a script inherit its choice

_kind: str | None = None  # None unless installed
_names: set[str] = set()  # device types to translate: npu, and cuda after torch_npu.contrib.transfer_to_npu on a CPU


def best() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def kind() -> str:
    """The type of the device that "npu" means: "cuda", "cpu", ..."""
    return _kind or best()


def chosen(device: str | None) -> str:
    """The type of device to use, from the argument or the environment; raises if this machine has none."""
    wanted, source = (device, "device") if device is not None else (os.environ.get(VARIABLE), VARIABLE)
    if not wanted:
        return best()
    if ":" in wanted:
        raise ValueError(
            f"{source}={wanted!r} must be a device type without an index, such as 'cuda' or 'cpu'; "
            "to choose one of several GPUs, set CUDA_VISIBLE_DEVICES"
        )
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{source}={wanted!r} is not available ({reason}); use {best()!r} or leave it out") from None
    return torch.device(wanted).type


def from_launcher(name: str, default: int) -> int:
    """A number that torchrun and other launchers set in the environment, such as LOCAL_RANK."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


def count_on_cpu() -> int:
    """How many devices to report where "npu" means the CPU: one per local process.

    Each process of a launched script uses the NPU whose index is its LOCAL_RANK.
    """
    return max(from_launcher("LOCAL_WORLD_SIZE", 1), from_launcher("LOCAL_RANK", 0) + 1)


def require_on_cpu(index: int | str, given: Any) -> None:
    """Raises unless the CPU stands for the NPU with this index; the error names ``given``."""
    count = count_on_cpu()
    if str(index) not in map(str, range(count)):
        names = "'npu:0'" if count == 1 else f"'npu:0' to 'npu:{count - 1}'"
        raise RuntimeError(f"{given!r} does not exist: the only device is the CPU, as {names}")


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
    """Whether this is the name of a device that has to be translated."""
    return isinstance(device, str) and device.partition(":")[0] in _names


def translated(device: Any) -> Any:
    """Replaces "npu" or "npu:0" by a device that torch knows; returns anything else unchanged, also integers."""
    if not is_named(device):
        return device
    target, index = kind(), device.partition(":")[2]
    if target == "cpu":
        if index:
            require_on_cpu(index, device)
        return target  # without an index: to torch, "cpu:0" is another device than "cpu"
    return f"{target}:{index}" if index else target


def is_npu_argument(device: Any) -> bool:
    """Whether a device argument means the NPU: by name, or by index where "npu" means the CPU.

    To torch an index alone means the accelerator. It resolves the index itself on a GPU, but not on a CPU.
    """
    return is_named(device) or (type(device) is int and _kind == "cpu")


def translated_argument(device: Any) -> Any:
    """:func:`translated` for a device argument, where an integer can only be an index."""
    return translated(f"npu:{device}" if is_npu_argument(device) and type(device) is int else device)


def translating(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that device names in all of its arguments are translated."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(translated, args), **{name: translated(value) for name, value in kwargs.items()})

    return call
