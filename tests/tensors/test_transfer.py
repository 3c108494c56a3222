"""Arrays on their way to a device. On a CPU nothing is copied; tests/gpu has the rest."""

from __future__ import annotations

import numpy as np
import torch

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
