"""Host memory without a GPU: parameters on the CPU are treated as if they were on a device of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from fusedadam.contract import refusals
from fusedadam.tensors import host_memory


class Pretended:
    """What a test asks about: slabs that were allocated, in bytes, and how often somebody waited for the device."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.waits = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def synchronize(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.waits += 1


@contextlib.contextmanager
def pretended(smallest: int = 64, allows_eager: bool = False) -> Iterator[Pretended]:
    """``allows_eager``: tests of what surrounds a step need no compiled kernels."""
    device = Pretended()
    with contextlib.ExitStack() as stack:
        for name, value in {
            "DEVICES": ("cpu",), "SMALLEST": smallest, "allocate": device.allocate, "synchronize": device.synchronize,
            "_slabs": [],
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(host_memory, name, value))
        if allows_eager:
            stack.enter_context(mock.patch.object(refusals, "offloads", lambda group, _: bool(group.get("offload"))))
        yield device
