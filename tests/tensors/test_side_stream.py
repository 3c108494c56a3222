"""The bound on gradients that wait for a slow bus, and which streams are joined.

That results are the same is in tests/gpu/test_states_on_host.py."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
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
    monkeypatch.setattr(side_stream, "LARGEST_QUEUE", 100)
    side, log = Side(None), []
    for k, nbytes in enumerate([40, 40, 40, 10, 300, 1]):
        side.make_room(nbytes)
        assert nbytes > 100 or sum(size for _, size in side.waiting) + nbytes <= 100
        side.waiting.append((Event(k, log), nbytes))
    assert log == [0, 1, 2, 3, 4]  # the oldest first; the large one waits for all, and the next one for it


@pytest.fixture
def cuda(monkeypatch):
    """A device without a device; yields the streams that the current one has waited for."""
    joined = []
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    torch.cuda.Event().query.return_value = False
    torch.cuda.current_stream.return_value = mock.Mock(wait_stream=joined.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return joined


def test_all_streams_are_joined_but_not_in_a_capture(cuda, monkeypatch):
    """A stream under capture refuses to wait for one that is not."""
    steps = SideStream()
    steps._sides = {k: Side(mock.Mock()) for k in range(3)}
    monkeypatch.setattr(side_stream, "capturing", lambda: True)
    steps.join()
    assert not cuda
    monkeypatch.setattr(side_stream, "capturing", lambda: False)
    steps.join()
    assert cuda == [side.stream for side in steps._sides.values()]


def test_devices_have_gradients_of_their_own(cuda):
    """Autograd has one thread for each device, and none may see another's list while that changes."""
    steps = SideStream()
    for k in (0, 1, 0):
        grad = mock.Mock(spec=torch.Tensor, device=torch.device("cuda", k), nbytes=10 + k)
        grad._is_zerotensor.return_value = True
        with steps.beside(grad):
            pass
    waiting = {device.index: [size for _, size in side.waiting] for device, side in steps._sides.items()}
    assert waiting == {0: [10, 10], 1: [11]}


def test_each_backward_pass_joins_at_its_end_also_after_one_that_failed(cuda, monkeypatch):
    monkeypatch.setattr(side_stream, "_record_use", lambda tensor, stream: None)
    steps, weights = SideStream(), [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    failing = True

    def step(param):
        with steps.beside(param.grad):
            if failing:
                raise ValueError

    for weight in weights:
        weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(ValueError):  # noqa: PT011
        sum(weights).sum().backward()
    failing = False
    for _ in range(2):
        cuda.clear()
        sum(weights).sum().backward()
        assert len(cuda) == 1  # once, although it had two steps
    cuda.clear()
    step(weights[0])
    assert len(cuda) == 1


@pytest.mark.parametrize("turned", [torch.conj, torch._neg_view, lambda x: x[1:]], ids=["conj", "neg", "part"])
def test_memory_of_lazily_changed_gradients_is_recorded(turned, monkeypatch):
    """torch would resolve them first, and record the memory of a copy; the call itself fails."""
    recorded = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: recorded.append((self.data_ptr(), self.numel()))
    )
    grad = torch.randn(4, dtype=torch.complex64)
    side_stream._record_use(turned(grad), None)
    assert recorded == [(grad.data_ptr(), 32)]
    side_stream._record_use(torch._efficientzerotensor(3), None)
    assert len(recorded) == 1
