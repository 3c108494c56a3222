"""Where torch is handed a device, "npu" is translated first: by a torch function mode.

A mode belongs to a thread. So threads that are started while installed enter it on their own (`patches.py`), and a
thread that uninstalls can take it only from itself: in others it does nothing from then on, and goes at their next call
of torch.
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

# functions of torch that take a device by position; all others take it as device=
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
            _leave_soon()
        elif func is torch.device:
            args, kwargs = _device(*args, **kwargs or {})
        elif func is torch.Tensor.pin_memory and device.kind() == "cpu":
            return args[0]  # memory is pinned for the way to another device, and there is none
        elif func is torch.Tensor.record_stream and device.kind() == "cpu":
            return None  # work on a CPU is done when its call returns, so memory is never freed too early
        elif kwargs or func is torch.Tensor.to or func is _PARSE_TO or any(type(value) is str for value in args):
            args, kwargs = _translated(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


_MODE = NpuMode()


def enter() -> bool:
    """In this thread, unless it is there already; says whether it was not."""
    new = _MODE not in _get_current_function_mode_stack()
    if new:
        _push_mode(_MODE)
    return new


def leave() -> None:
    """In this thread, wherever in the stack it is by now."""
    above: list[Any] = []
    while (stack := _get_current_function_mode_stack()) and _MODE in stack:
        top = _pop_mode()
        if top is not _MODE:
            above.append(top)
    for mode in reversed(above):
        _push_mode(mode)


_profile = threading.local()  # of each thread that the mode is about to leave: its profile function


def _leave_soon() -> None:
    """While a mode handles a call torch has taken it off the stack, and puts it back at the end, whatever we do.

    What runs right after that is the thread's profile function.
    """
    profile = sys.getprofile()
    if profile is not None and not isinstance(profile, types.FunctionType):
        return  # cProfile's, which could not be put back; the mode stays, and does nothing
    if profile is not _leave_now:
        _profile.before = profile
        sys.setprofile(_leave_now)


def _leave_now(*_: Any) -> None:
    if not device.installed():  # otherwise somebody wants it again
        if _MODE not in _get_current_function_mode_stack():
            return
        leave()
    sys.setprofile(_profile.before)


def _device(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name = args[0] if args else kwargs.get("type")
    number = args[1] if len(args) > 1 else kwargs.get("index")
    if type(name) is int:
        return (device.placed(name), *args[1:]), kwargs
    if not device.is_named(name):
        return args, kwargs
    return (device.translated(name if number is None else f"{name}:{number}"),), {}


def _translated(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    changed: dict[str, Any] = {}
    if device.kind() == "cpu":
        if kwargs.get("pin_memory"):
            changed["pin_memory"] = False
        moved = device.is_meant(kwargs.get("device")) or any(map(device.is_meant, args[1:2]))
        if func is torch.Tensor.to and moved and len(args) < 5:
            changed["copy"] = True  # as from any other device: what is then changed in place leaves the original alone
    if "device" in kwargs:
        changed["device"] = device.placed(kwargs["device"])
    if any(func is own for own in BY_POSITION):
        args = tuple(map(device.placed, args))
    return args, {**kwargs, **changed}
