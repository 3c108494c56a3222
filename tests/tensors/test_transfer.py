"""Arrays on their way to a device. On a CPU nothing is copied; tests/gpu has the rest."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fusedadam.tensors import transfer
from fusedadam.tensors.transfer import capturing, outside_inference_mode, sent


def test_on_a_cpu_the_tensor_is_the_array_itself():
    array = np.arange(4, dtype=np.int64)
    tensor = sent(array, torch.device("cpu"))
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2, 3]


def test_tensors_made_outside_inference_mode_can_be_written_afterwards():
    with torch.inference_mode(), outside_inference_mode():
        kept = torch.zeros(2)
        assert not torch.is_grad_enabled()
    kept.add_(1)
    assert not kept.is_inference()


def test_nothing_is_captured_where_cuda_is_not_in_use():
    assert torch.cuda.is_initialized() or not capturing()


class OnCuda(torch.Tensor):
    """Says that it is on the second GPU."""

    device = torch.device("cuda", 1)

    def get_device(self):
        return 1


@pytest.mark.parametrize("current", [0, 1])
def test_small_copies_are_commands_of_the_tensors_own_device(monkeypatch, current):
    """Stream 0, torch's default, is another stream on each device: a copy there would not come before the kernels."""
    devices, copies = [current], []

    @contextlib.contextmanager
    def guard(device):
        devices.append(device.index)
        yield
        devices.pop()

    driver = SimpleNamespace(copy=lambda *copied: copies.append((devices[-1], *copied)))
    monkeypatch.setattr(transfer, "driver_of", lambda device: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", guard)
    array, target = np.arange(12, dtype=np.int64).reshape(4, 3), torch.zeros(4, 3).as_subclass(OnCuda)
    transfer.update(target, array, slice(1, 3))
    assert copies == [(1, target.data_ptr() + 24, array.ctypes.data + 24, 48, 1)]
