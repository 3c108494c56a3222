"""Scalars by torch operations: for devices without kernels, and for scalars that have no list of operations.

That they have the bits of the host, and of kernels: see test_device_scalars.py and test_scalar_kernel.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusedadam.engine.device_scalars import DeviceScalars
from fusedadam.rules.ops import power
from tests.engine import test_scalar_kernel
from tests.engine.test_device_scalars import as_options
from tests.rules.test_tracing import defined
from tests.support import Case


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, Triton does not run on the CPU")
def test_a_rule_without_a_list_of_operations_is_computed_by_torch_and_counted_by_the_kernel():
    made = defined(lambda step, lr: {"x": lr * power(step, 0.5)})
    case = Case(made, {}, {"lr": 0.3})
    table, _alive = test_scalar_kernel.table_of(case)
    flat = torch.zeros(4)
    device = DeviceScalars(made, table, flat, slice(None), np.zeros(4, dtype=np.int64))
    for step in (1, 2, 3):
        device.update([as_options(case)])
        expected = float(made.scalars(step=step, lr=0.3)["x"])
        np.testing.assert_allclose(table.numbers[0], expected, rtol=1e-15)
        device.count()
        assert flat.tolist() == [float(step)] * 4
