"""torch.npu where "npu" means the CPU: devices and events that do not exist raise."""

import pytest
import torch


def test_events_that_measured_nothing_say_so(cpu):
    plain, fresh, recorded = torch.npu.Event(), torch.npu.Event(True), torch.npu.Event(enable_timing=True)
    plain.record()
    recorded.record()
    for first, last in ((plain, recorded), (recorded, plain), (fresh, recorded), (recorded, fresh)):
        with pytest.raises(ValueError, match="enable_timing=True and recorded"):
            first.elapsed_time(last)


def test_another_device_does_not_exist_on_a_cpu(cpu):
    npu = torch.npu
    for refused in (
        lambda: npu.set_device(1), lambda: npu.set_device("npu:1"), lambda: npu.device(1).__enter__(),
        lambda: npu.synchronize(2), lambda: npu.get_device_name("npu:1"), lambda: npu.memory_allocated(1),
        lambda: npu.Stream(1), lambda: npu.current_stream("npu:3"), lambda: npu.set_device(torch.device("meta")),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="does not exist: the only device is the CPU, as 'npu:0'"):
            refused()
