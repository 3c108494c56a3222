"""torch.npu, which is torch_npu.npu: torch.cuda on a GPU, `on_cpu.py` on a CPU. Other attributes raise."""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import torch

from fusedadam.ascend import amp as amp
from fusedadam.ascend import device as _devices
from fusedadam.ascend import on_cpu as _on_cpu

# options of Ascend's compiler: they affect its results by rounding only, and do nothing here
SWITCHES = ("set_compile_mode", "set_option")
SETTINGS = ("config", "conv", "matmul")


def is_available() -> bool:
    """True: "npu" always means some device."""
    return True


def set_device(device: Any) -> None:
    """Makes a device the current one; ``"npu"`` without an index already is."""
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
    module = _on_cpu if kind == "cpu" else torch.get_device_module(kind)
    value = getattr(module, name, None)
    if value is None and name.endswith("Tensor"):  # FloatTensor and the like
        value = getattr(torch, name, None)
    if value is None or isinstance(value, types.ModuleType):
        use = "leave it out, or use a function of torch for any device" if kind == "cpu" else f"see torch.{kind}"
        raise AttributeError(f"torch.npu.{name} is not available: npu means {kind} here; {use}")
    return _devices.translating(value) if isinstance(value, types.FunctionType) else value


class _Settings:
    """torch.npu.config, torch.npu.conv, torch.npu.matmul: setting their attributes warns and does nothing."""

    _name: str

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"torch.npu.{self._name}.{name} has no value, since it does nothing here; do not read it")

    def __setattr__(self, name: str, value: Any) -> None:
        _warn_ignored(f"{self._name}.{name}")


@functools.cache
def _warn_ignored(name: str) -> None:
    warnings.warn(
        f"torch.npu.{name} configures Ascend's compiler and does nothing here, because npu means {_devices.kind()}; "
        "you can keep the line",
        stacklevel=3,
    )


def _switch(name: str, *_: Any, **__: Any) -> None:
    _warn_ignored(name)
