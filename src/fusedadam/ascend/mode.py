"""A torch function mode that translates "npu" in the device arguments of torch functions.

Each thread has its own stack of modes. Threads that start while installed enter the mode themselves (`patches.py`).
A thread that uninstalls can only remove the mode from its own stack; in other threads the mode does nothing from then
on, and removes itself at their next call of a torch function.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from fusedadam.ascend import device

_PARSE_TO = torch._C._nn._parse_to  # Module.to

# torch functions that take a device as a positional argument; all others take it as device=
BY_POSITION: tuple[Callable[..., Any], ...] = (
    torch.Tensor.to,
    torch.Tensor.pin_memory,
    torch.Tensor.is_pinned,
    _PARSE_TO,
)


class NpuMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not device.installed():
            _leave_after_this_call()
        elif func is torch.device:
            args, kwargs = _device(*args, **kwargs or {})
        elif func is torch.Tensor.pin_memory and device.kind() == "cpu":
            return args[0]  # pinning speeds up copies to another device, and there is none
        elif func is torch.Tensor.record_stream and device.kind() == "cpu":
            return None  # calls on a CPU are synchronous, so memory is never freed too early
        elif kwargs or func is torch.Tensor.to or func is _PARSE_TO or any(type(value) is str for value in args):
            args, kwargs = _translated(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


_MODE = NpuMode()


def enter() -> bool:
    """Enters the mode in this thread; returns False if it was already entered."""
    new = _MODE not in _get_current_function_mode_stack()
    if new:
        _push_mode(_MODE)
    return new


def leave() -> None:
    """Removes the mode from this thread's stack, wherever it is."""
    above: list[Any] = []
    while (stack := _get_current_function_mode_stack()) and _MODE in stack:
        top = _pop_mode()
        if top is not _MODE:
            above.append(top)
    for mode in reversed(above):
        _push_mode(mode)


_profile = threading.local()  # before: this thread's profile function, until the mode has left


def _leave_after_this_call() -> None:
    """Leaves the mode from a profile function, since it cannot leave while it handles a call.

    torch takes a mode off the stack while it handles a call, and puts it back afterwards. The first code that runs
    then is the thread's profile function.
    """
    profile = sys.getprofile()
    if profile is not None and not isinstance(profile, types.FunctionType):
        return  # cProfile's cannot be restored, so the mode stays and does nothing
    if profile is not _leave_now:
        _profile.before = profile
        sys.setprofile(_leave_now)


def _leave_now(*_: Any) -> None:
    if not device.installed():  # otherwise it was installed again
        if _MODE not in _get_current_function_mode_stack():
            return
        leave()
    sys.setprofile(_profile.before)


def _device(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``torch.device``, translated."""
    name = args[0] if args else kwargs.get("type")
    index = args[1] if len(args) > 1 else kwargs.get("index")
    if type(name) is int:
        return (device.translated_argument(name), *args[1:]), kwargs
    if not device.is_named(name):
        return args, kwargs
    return (device.translated(name if index is None else f"{name}:{index}"),), {}


def _translated(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    changed: dict[str, Any] = {}
    if device.kind() == "cpu":
        if kwargs.get("pin_memory"):
            changed["pin_memory"] = False
        to_npu = device.is_npu_argument(kwargs.get("device")) or any(map(device.is_npu_argument, args[1:2]))
        if func is torch.Tensor.to and to_npu and len(args) < 5:
            changed["copy"] = True  # a tensor moved to an NPU does not share memory with the original
    if "device" in kwargs:
        changed["device"] = device.translated_argument(kwargs["device"])
    if any(func is taker for taker in BY_POSITION):
        args = tuple(map(device.translated_argument, args))
    return args, {**kwargs, **changed}
