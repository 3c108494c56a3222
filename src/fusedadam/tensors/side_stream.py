"""Steps beside the model: on a stream of their own, while the model computes other gradients.

With states in host memory a step waits for the bus, and the multiprocessors can do something else meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedadam.tensors.shards import local

PRIORITY = -1  # its few programs begin before the model's many, which would take all multiprocessors
WAITING = 1 << 29  # bytes of gradients: if the bus is slower than the model, the model waits for it


class SideStream:
    """``beside`` runs steps there; ``join`` lets the current stream wait for all of them."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: deque[tuple[torch.cuda.Event, int]] = deque()  # gradients in use, and their sizes
        self._joins_later = False

    @contextlib.contextmanager
    def beside(self, grad: Tensor) -> Iterator[None]:
        """What is launched inside follows what the current stream has so far. ``grad`` may be freed at once."""
        here: Tensor = local(grad)
        stream = self._streams.get(here.device)
        if stream is None:
            stream = self._streams[here.device] = torch.cuda.Stream(here.device, priority=PRIORITY)
        self.make_room(here.nbytes)
        stream.wait_stream(torch.cuda.current_stream(here.device))
        here.record_stream(stream)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            event = torch.cuda.Event()
            event.record(stream)
            self._waiting.append((event, here.nbytes))
            self._join_after_backward()

    def make_room(self, nbytes: int) -> None:
        """Waits on the host, since the allocator reuses memory only when the host has seen that a stream is done."""
        while self._waiting and sum(size for _, size in self._waiting) + nbytes > WAITING:
            self._waiting.popleft()[0].synchronize()

    def _join_after_backward(self) -> None:
        if not self._joins_later:
            self._joins_later = True
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self.join)
            except RuntimeError:  # a hook that someone calls outside of a backward pass
                self.join()

    def join(self) -> None:
        self._joins_later = False
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        while self._waiting and self._waiting[0][0].query():
            self._waiting.popleft()
