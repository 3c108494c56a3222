"""From the host to a device, without waiting for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

_in_graphs: list[Tensor] = []


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """For tensors that are kept: what is made in inference mode can never be written to outside of it."""
    with torch.inference_mode(False), torch.no_grad():  # leaving that mode switches gradients on
        yield


def sent(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on a device; on a CPU it is the array itself."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    return keep_for_graph(pinned(array).to(device, non_blocking=True))


def pinned(array: npt.NDArray[Any]) -> Tensor:
    """A copy that a device can fetch when it gets there; torch keeps the memory until then."""
    host = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True, device="cpu")
    host.numpy()[...] = array
    return keep_for_graph(host)


def keep_for_graph(tensor: Tensor) -> Tensor:
    """A tensor that a CUDA graph being captured will read: whenever it is replayed, so it is kept for good."""
    if capturing():
        _in_graphs.append(tensor)
    return tensor


def capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
