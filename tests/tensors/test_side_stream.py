"""The bound on gradients that wait for a slow bus. That results are the same is in tests/gpu/test_states_on_host.py."""

from __future__ import annotations

from fusedadam.tensors import side_stream
from fusedadam.tensors.side_stream import SideStream


class Event:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def synchronize(self):
        self.log.append(self.name)


def test_gradients_never_pile_up(monkeypatch):
    monkeypatch.setattr(side_stream, "WAITING", 100)
    side, log = SideStream(), []
    for k, nbytes in enumerate([40, 40, 40, 10, 300, 1]):
        side.make_room(nbytes)
        assert nbytes > 100 or sum(size for _, size in side._waiting) + nbytes <= 100
        side._waiting.append((Event(k, log), nbytes))
    assert log == [0, 1, 2, 3, 4]  # the oldest first; the large one waits for all, and the next one for it
