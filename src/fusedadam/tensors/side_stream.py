"""Steps beside the model: on a stream of their own, while the model computes other gradients.

With states in host memory a step waits for the bus, and the multiprocessors can do something else meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusedadam.tensors.shards import local
from fusedadam.tensors.transfer import capturing

PRIORITY = -1  # its few programs begin before the model's many, which would take all multiprocessors
LARGEST_QUEUE = 1 << 29  # bytes of gradients: if the bus is slower than the model, the model waits for steps


@dataclass
class _Side:
    """The stream of one device. Autograd has one thread for each device, and each thread has a list of its own here."""

    stream: torch.cuda.Stream
    waiting: deque[tuple[torch.cuda.Event, int]] = field(default_factory=deque)  # gradients in use, and their sizes

    def make_room(self, nbytes: int) -> None:
        """Waits on the host, since the allocator reuses memory only when the host has seen that a stream is done."""
        while self.waiting and sum(size for _, size in self.waiting) + nbytes > LARGEST_QUEUE:
            self.waiting.popleft()[0].synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        while self.waiting and self.waiting[0][0].query():
            self.waiting.popleft()


class SideStream:
    """``beside`` runs steps there; ``join`` lets the current stream wait for all of them."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, _Side] = {}
        self._joined_after = -1  # the last backward pass that was told to join at its end

    @contextlib.contextmanager
    def beside(self, grad: Tensor) -> Iterator[None]:
        """What is launched inside follows what the current stream has so far. ``grad`` may be freed at once."""
        here: Tensor = local(grad)
        side = self._sides.get(here.device)
        if side is None:
            side = self._sides[here.device] = _Side(torch.cuda.Stream(here.device, priority=PRIORITY))
        side.make_room(here.nbytes)
        side.stream.wait_stream(torch.cuda.current_stream(here.device))
        _record_use(here, side.stream)
        try:
            with torch.cuda.stream(side.stream):
                yield
        finally:
            event = torch.cuda.Event()
            event.record(side.stream)
            side.waiting.append((event, here.nbytes))
            self._join_after_backward()

    def _join_after_backward(self) -> None:
        """Once for each backward pass: one that fails does not call back."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:  # a hook that someone calls outside of one
            self.join()
        elif backward != self._joined_after:
            self._joined_after = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.join)

    def join(self) -> None:
        """A stream under capture cannot wait for these, and in a capture nothing runs beside."""
        for side in () if capturing() else list(self._sides.values()):
            side.join()


def _record_use(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Keeps the memory until the stream is done. A lazily conjugated or negated tensor cannot be recorded itself, since
    torch would resolve it first; one of zeros alone has no memory."""
    if not tensor._is_zerotensor():
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory.set_(tensor.untyped_storage()).record_stream(stream)
