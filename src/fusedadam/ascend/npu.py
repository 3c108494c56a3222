"""torch.npu, torch_npu.npu: torch.cuda on a GPU; on a CPU what `on_cpu.py` has. What is neither says so by name."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import torch

from fusedadam.ascend import amp as amp
from fusedadam.ascend import device as _devices
from fusedadam.ascend import on_cpu as _on_cpu

# what only tells Ascend's compiler how to work: results do not depend on it, beyond rounding
SWITCHES = ("set_compile_mode", "set_option")
SETTINGS = ("config", "conv", "matmul")


def is_available() -> bool:
    """There is always a device that "npu" means."""
    return True


def set_device(device: Any) -> None:
    """``"npu"`` without a number is the current one."""
    where = _devices.translated(device)
    if _devices.kind() == "cpu":
        _on_cpu.set_device(where)
    elif isinstance(where, int) or torch.device(where).index is not None:
        torch.get_device_module(_devices.kind()).set_device(where)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in SWITCHES:
        return functools.partial(_switch, name)
    if name in SETTINGS:
        return _Settings(name)
    kind = _devices.kind()
    there = _on_cpu if kind == "cpu" else torch.get_device_module(kind)
    value = getattr(there, name, None)
    if value is None and name.endswith("Tensor"):  # FloatTensor and the like
        value = getattr(torch, name, None)
    if value is None or isinstance(value, types.ModuleType):
        use = "leave it out, or use what torch has for every device" if kind == "cpu" else f"see torch.{kind}"
        raise AttributeError(f"torch.npu.{name} does not exist here, where npu means {kind}; {use}")
    return _devices.translating(value) if isinstance(value, types.FunctionType) else value


class _Settings:
    """torch.npu.config, torch.npu.conv, torch.npu.matmul: attributes that can be set, and do nothing."""

    _name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"torch.npu.{self._name}.{name} does nothing here, and has no value; do not ask for it")

    def __setattr__(self, name: str, value: Any) -> None:
        _told(f"{self._name}.{name}")


@functools.cache
def _told(name: str) -> None:
    warnings.warn(
        f"torch.npu.{name} tells Ascend's compiler how to work, and does nothing here, where npu means "
        f"{_devices.kind()}; the line can stay",
        stacklevel=3,
    )


def _switch(name: str, *_: Any, **__: Any) -> None:
    _told(name)
