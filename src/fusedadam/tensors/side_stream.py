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

PRIORITY = -1  # its few programs begin before the model's many, which would take all multiprocessors
WAITING = 1 << 29  # bytes of gradients: if the bus is slower than the model, the model waits for it


@dataclass
class _Side:
    """Of one device, whose gradients one thread of autograd computes."""

    stream: torch.cuda.Stream
    waiting: deque[tuple[torch.cuda.Event, int]] = field(default_factory=deque)  # gradients in use, and their sizes
    is_used: bool = False  # since the last join

    def make_room(self, nbytes: int) -> None:
        """Waits on the host, since the allocator reuses memory only when the host has seen that a stream is done."""
        while self.waiting and sum(size for _, size in self.waiting) + nbytes > WAITING:
            self.waiting.popleft()[0].synchronize()

    def join(self) -> None:
        self.is_used = False
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        while self.waiting and self.waiting[0][0].query():
            self.waiting.popleft()


class SideStream:
    """``beside`` runs steps there; ``join`` lets the current stream wait for all of them."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, _Side] = {}
        self._joins_later = False

    @contextlib.contextmanager
    def beside(self, grad: Tensor) -> Iterator[None]:
        """What is launched inside follows what the current stream has so far. ``grad`` may be freed at once."""
        here: Tensor = local(grad)
        side = self._sides.get(here.device)
        if side is None:
            side = self._sides[here.device] = _Side(torch.cuda.Stream(here.device, priority=PRIORITY))
        side.make_room(here.nbytes)
        side.stream.wait_stream(torch.cuda.current_stream(here.device))
        here.record_stream(side.stream)
        side.is_used = True
        try:
            with torch.cuda.stream(side.stream):
                yield
        finally:
            event = torch.cuda.Event()
            event.record(side.stream)
            side.waiting.append((event, here.nbytes))
            self._join_after_backward()

    def _join_after_backward(self) -> None:
        if not self._joins_later:
            self._joins_later = True
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self.join)
            except RuntimeError:  # a hook that someone calls outside of a backward pass
                self.join()

    def join(self) -> None:
        self._joins_later = False
        for side in list(self._sides.values()):
            if side.is_used:  # a capture cannot wait for others, and has none of its own
                side.join()
