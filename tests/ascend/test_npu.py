"""torch.npu: devices, seeds, memory, events, streams, and the options of Ascend's compiler."""

import os
import time
import warnings

import pytest
import torch

from fusedadam.ascend import npu as npu_module

MEGABYTE = 1 << 20
SLACK = MEGABYTE * max(1, (os.cpu_count() or 1) // 4)  # each core has a batch of its own


def test_devices(kind):
    npu = torch.npu
    assert npu.is_available() is True
    assert npu.device_count() == (1 if kind == "cpu" else torch.cuda.device_count())
    for device in (0, "npu", "npu:0", torch.device("npu:0")):
        npu.set_device(device)
        npu.synchronize(device)
        assert npu.current_device() == 0
        with npu.device(device):
            assert torch.ones(1, device="npu").device.type == kind
        assert isinstance(npu.get_device_name(device), str)
    assert npu.get_device_name() == npu.get_device_name(0) != ""
    npu.synchronize()
    npu.empty_cache()


def test_seeds(kind):
    for seed in (torch.npu.manual_seed, torch.npu.manual_seed_all):
        draws = []
        for value in (1, 1, 2):
            seed(value)
            draws.append(torch.rand(5, device="npu"))
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])


def test_memory_is_counted_and_its_peak_falls_when_told_to(kind):
    """Linux counts the memory of a process in batches, so a peak may be a little below what was seen."""
    npu = torch.npu
    npu.reset_peak_memory_stats()
    before = npu.memory_allocated()
    large = torch.ones(128 * MEGABYTE, dtype=torch.uint8, device="npu")
    during = npu.memory_allocated("npu:0")
    assert during - before > 100 * MEGABYTE
    assert npu.max_memory_allocated() > during - SLACK
    del large
    npu.empty_cache()
    assert npu.memory_allocated(0) < during - 100 * MEGABYTE
    assert npu.max_memory_allocated() > during - SLACK
    npu.reset_peak_memory_stats(0)
    assert npu.max_memory_allocated("npu") < during - 100 * MEGABYTE


def test_events_measure_time(kind):
    first, last = (torch.npu.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    first.record()
    time.sleep(0.05)
    last.record(torch.npu.current_stream())
    last.synchronize()
    assert 45 < first.elapsed_time(last) < 1e3 * (time.perf_counter() - began) + 5
    assert last.query()


def test_streams(kind):
    npu = torch.npu
    side, event = npu.Stream(device="npu:0"), npu.Event()
    side.wait_stream(npu.current_stream())
    with npu.stream(side):
        total = torch.ones(1000, device="npu").sum()
        event.record(side)
    npu.current_stream().wait_event(event)
    npu.default_stream().wait_stream(side)
    side.record_event().synchronize()
    side.synchronize()
    assert total.item() == 1000
    assert side.query()
    assert npu.current_stream("npu") == npu.default_stream(0)


def test_memory_in_use_on_a_stream_is_kept(kind):
    """A CPU has finished with it by then: there is nothing to record."""
    x = torch.ones(4, device="npu")
    for stream in (torch.npu.current_stream(), torch.npu.Stream(), torch.Stream(device="npu")):
        assert x.record_stream(stream) is None
    assert x.sum().item() == 4


def test_torchs_own_streams_and_events_take_npu(kind):
    for device in ("npu", "npu:0", torch.device("npu", 0), 0, None):
        stream = torch.Stream(device=device, priority=0)
        assert isinstance(stream, torch.Stream)
        assert issubclass(type(stream), torch.Stream)
        assert stream.device.type == kind
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        assert isinstance(first, torch.Event)
        first.record(stream)
        with stream:
            total = torch.ones(1000, device="npu").sum()
        last.record(stream)
        torch.npu.current_stream().wait_stream(stream)
        torch.npu.current_stream().wait_event(last)
        last.synchronize()
        assert first.elapsed_time(last) >= 0
        assert total.item() == 1000
    assert isinstance(torch.npu.Stream(), torch.Stream)
    assert isinstance(torch.npu.Event(), torch.Event)
    assert torch.Stream("npu").record_event().query()
    assert callable(torch.Event.elapsed_time)
    assert callable(torch.Stream.wait_event)
    assert not isinstance(3, torch.Stream)


def test_a_random_state_is_brought_back(kind):
    npu = torch.npu
    npu.seed_all()
    npu.manual_seed(3)
    assert npu.initial_seed() == 3
    for get, put in (
        (npu.get_rng_state, npu.set_rng_state),
        (lambda: npu.get_rng_state("npu"), lambda state: npu.set_rng_state(state, "npu:0")),
        (npu.get_rng_state_all, npu.set_rng_state_all),
    ):
        before = get()
        first = torch.rand(3, device="npu")
        put(before)
        assert torch.equal(torch.rand(3, device="npu"), first)


def test_what_logging_asks_about_memory_and_the_device(kind):
    npu = torch.npu
    free, total = npu.mem_get_info()
    assert 0 < free <= total
    assert npu.get_device_properties(0).total_memory > free
    assert npu.get_device_properties("npu:0").name == npu.get_device_name()
    kept = torch.ones(MEGABYTE, device="npu")
    assert npu.max_memory_reserved() >= npu.memory_reserved() - MEGABYTE
    assert npu.memory_reserved() >= kept.nbytes
    stats = npu.memory_stats()
    for what in ("allocated_bytes", "reserved_bytes"):
        assert stats[f"{what}.all.peak"] >= stats[f"{what}.all.current"] - MEGABYTE > 0
    assert "memory" in npu.memory_summary().lower()
    assert npu.is_bf16_supported() in (True, False)
    npu.init()
    assert npu.is_initialized()
    npu.ipc_collect()
    npu.set_stream(npu.current_stream())
    npu.reset_max_memory_allocated()


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


def set_config():
    torch.npu.config.allow_internal_format = False


def set_matmul():
    torch.npu.matmul.allow_hf32 = True


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("torch.npu.set_compile_mode", lambda: torch.npu.set_compile_mode(jit_compile=False)),
        ("torch.npu.set_option", lambda: torch.npu.set_option({"ACL_OP_COMPILER_CACHE_MODE": "enable"})),
        ("torch.npu.config.allow_internal_format", set_config),
        ("torch.npu.matmul.allow_hf32", set_matmul),
    ],
)
def test_switches_of_ascends_compiler_warn_once(kind, name, switch):
    npu_module._warn_ignored.cache_clear()
    with pytest.warns(UserWarning, match=f"{name} configures Ascend's compiler") as warned:
        switch()
    assert [w.filename for w in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        switch()
