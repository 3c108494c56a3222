"""The bound on gradients that wait for a slow bus, and which streams are joined.

That results are the same is in tests/gpu/test_states_on_host.py."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from fusedadam.tensors import side_stream
from fusedadam.tensors.side_stream import SideStream
from fusedadam.tensors.side_stream import _Side as Side


class Event:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def synchronize(self):
        self.log.append(self.name)


def test_gradients_never_pile_up(monkeypatch):
    monkeypatch.setattr(side_stream, "WAITING", 100)
    side, log = Side(None), []
    for k, nbytes in enumerate([40, 40, 40, 10, 300, 1]):
        side.make_room(nbytes)
        assert nbytes > 100 or sum(size for _, size in side.waiting) + nbytes <= 100
        side.waiting.append((Event(k, log), nbytes))
    assert log == [0, 1, 2, 3, 4]  # the oldest first; the large one waits for all, and the next one for it


def test_only_streams_in_use_are_joined(monkeypatch):
    """A capture refuses to wait for a stream that has no part in it."""
    joined, steps = [], SideStream()
    stream = mock.Mock(wait_stream=joined.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    steps._sides = {k: Side(mock.Mock(), is_used=k == 1) for k in range(3)}
    steps.join()
    steps.join()
    assert joined == [steps._sides[1].stream]


def test_devices_have_gradients_of_their_own(monkeypatch):
    """Autograd has one thread for each device, and none may see another's list while that changes."""
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    torch.cuda.Event().query.return_value = False
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    steps = SideStream()
    for k in (0, 1, 0):
        with steps.beside(mock.Mock(spec=torch.Tensor, device=torch.device("cuda", k), nbytes=10 + k)):
            pass
    waiting = {device.index: [size for _, size in side.waiting] for device, side in steps._sides.items()}
    assert waiting == {0: [10, 10], 1: [11]}
