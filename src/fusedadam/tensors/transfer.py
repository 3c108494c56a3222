"""Copies from the host to a device and back, without waiting for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from fusedadam.tensors.cuda_driver import SMALL, driver_of

NOT_YET = -1.0
_in_graphs: list[Tensor] = []  # never emptied: a graph may be replayed at any time


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """For creating tensors that are kept: inference tensors cannot be written to outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():  # inference_mode(False) enables gradients
        yield


def sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array to a device; on a CPU the tensor shares the array's memory."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    return keep_for_graph(pinned(array).to(device, non_blocking=True))


def pinned(array: npt.NDArray[Any]) -> Tensor:
    """A copy in pinned memory, which a device reads asynchronously; torch keeps the memory until it has."""
    host = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True, device="cpu")
    host.numpy()[...] = array
    return keep_for_graph(host)


def requested(numbers: Tensor) -> Tensor:
    """A copy of numbers on the host, each NOT_YET until it has arrived; numbers on a CPU are returned themselves."""
    if numbers.device.type == "cpu":
        return numbers
    host = torch.full(numbers.shape, NOT_YET, dtype=numbers.dtype, pin_memory=True, device="cpu")
    return host.copy_(numbers, non_blocking=True)


def update(tensor: Tensor, array: npt.NDArray[Any], rows: slice) -> None:
    """Copies some rows of an array to the same rows of a tensor on a device; the array may change afterwards."""
    driver, nbytes = driver_of(tensor.device), (rows.stop - rows.start) * array.strides[0]
    if driver is None or nbytes > SMALL or capturing():
        tensor[rows].copy_(pinned(array[rows]), non_blocking=True)
    else:
        begin = rows.start * array.strides[0]
        with on(tensor.device):  # stream 0 is another stream on each device
            driver.copy(tensor.data_ptr() + begin, array.ctypes.data + begin, nbytes, tensor.get_device())


def keep_for_graph(tensor: Tensor) -> Tensor:
    """Keeps a tensor alive if a CUDA graph is being captured, since every replay reads it."""
    if capturing():
        _in_graphs.append(tensor)
    return tensor


def current_streams(devices: Iterable[torch.device]) -> tuple[int, ...]:
    """The current stream of each device that has several."""
    return tuple(torch.cuda.current_stream(d).cuda_stream for d in devices if d.type == "cuda")


def capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Commands go to the current device, which need not be the tensors' own."""
    if device.type == "cpu" or (device.type == "cuda" and torch._C._cuda_getDevice() == device.index):
        return contextlib.nullcontext()
    module = getattr(torch, device.type)
    if device.index == module.current_device():
        return contextlib.nullcontext()
    guard: contextlib.AbstractContextManager[Any] = module.device(device)
    return guard
