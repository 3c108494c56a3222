"""CUDA's driver, called directly: one kernel or one small copy costs two or three microseconds of the host's time.

torch's copy of a few words takes ten, and so does Triton's launcher for each kernel, all of it in Python: as much as
everything else in a step of a small model. Where the driver is unavailable (ROCm, Windows, another device), or a kernel
needs more than a plain launch, torch and Triton do it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

# Copies from pageable memory of up to 64 KB: the driver takes the bytes along with the command, and does not wait.
SMALL = 1 << 16
INVALID_CONTEXT = 201  # this thread has not used the device yet


class Driver:
    """The functions of libcuda that are used here, on the current device and stream."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._launch, self._copy = library.cuLaunchKernel, library.cuMemcpyHtoDAsync_v2
        self._launch.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
        self._copy.argtypes = [c_uint64, c_void_p, c_size_t, c_void_p]
        self._parameter = library.cuFuncGetParamInfo
        self._parameter.argtypes = [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)]

    def launch(self, kernel: Kernel, device: int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        arguments = (kernel.function, *kernel.grid, kernel.threads, 1, 1, kernel.shared, stream, kernel.pointers, None)
        status = self._launch(*arguments)
        if status == INVALID_CONTEXT:
            self._make_current(device)
            status = self._launch(*arguments)
        self._check(status)

    def copy(self, target: int, source: int, nbytes: int, device: int) -> None:
        """From pageable memory of the host, which may change as soon as this returns; at most SMALL bytes."""
        status = self._copy(target, source, nbytes, torch._C._cuda_getCurrentRawStream(device))
        if status == INVALID_CONTEXT:
            self._make_current(device)
            status = self._copy(target, source, nbytes, torch._C._cuda_getCurrentRawStream(device))
        self._check(status)

    def parameter_sizes(self, function: int) -> list[int]:
        """The bytes of each parameter of a kernel."""
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while self._parameter(function, len(sizes), byref(offset), byref(size)) == 0:
            sizes.append(size.value)
        return sizes

    def _make_current(self, device: int) -> None:
        """Makes the context that torch uses on a device current in this thread."""
        context, handle = c_void_p(), c_int()
        self._check(self._library.cuDeviceGet(byref(handle), device))
        self._check(self._library.cuDevicePrimaryCtxRetain(byref(context), handle))
        self._check(self._library.cuCtxSetCurrent(context))

    def _check(self, status: int) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            raise RuntimeError(
                f"CUDA reports error {status} ({(text.value or b'unknown').decode()}), of this launch or of anything "
                "that ran before; set CUDA_LAUNCH_BLOCKING=1 to see where it comes from"
            )


class Kernel:
    """A compiled kernel with its grid and arguments, which are words: addresses and integers."""

    def __init__(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, arguments: Sequence[int]
    ) -> None:
        self.function, self.grid, self.threads, self.shared = function, grid, threads, shared
        self.words = (c_uint64 * len(arguments))(*(argument % (1 << 64) for argument in arguments))
        begin = ctypes.addressof(self.words)
        self.pointers = (c_void_p * len(arguments))(*(begin + 8 * k for k in range(len(arguments))))


@functools.cache
def driver() -> Driver | None:
    """None where it is unavailable."""
    if torch.version.cuda is None:
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):  # no such library, or a driver before CUDA 12.4
        return None


def driver_of(device: torch.device) -> Driver | None:
    return driver() if device.type == "cuda" else None


def raw(argument: Any) -> int:
    """An argument of a kernel as a word."""
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else int(argument)
