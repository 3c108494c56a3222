"""torch.npu and torch_npu.npu.amp: what there is does what its name says, and what there is not says so."""

import importlib
import time
import warnings

import pytest
import torch

from fusedadam import ascend
from fusedadam.ascend import npu as npu_module

KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MEGABYTE = 1 << 20


@pytest.fixture(params=KINDS)
def kind(request):
    """Installed, and what "npu" means."""
    with ascend.install(request.param):
        yield request.param


@pytest.fixture
def cpu():
    with ascend.install("cpu"):
        yield


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
    assert npu.max_memory_allocated() > during - MEGABYTE
    del large
    npu.empty_cache()
    assert npu.memory_allocated(0) < during - 100 * MEGABYTE
    assert npu.max_memory_allocated() > during - MEGABYTE
    npu.reset_peak_memory_stats(0)
    assert npu.max_memory_allocated("npu") < during - 100 * MEGABYTE


def test_events_measure_time(kind):
    first, last = (torch.npu.Event(enable_timing=True) for _ in range(2))
    first.record()
    time.sleep(0.05)
    last.record(torch.npu.current_stream())
    last.synchronize()
    assert 45 < first.elapsed_time(last) < 5000
    assert last.query()


def test_events_that_measured_nothing_say_so(cpu):
    plain, fresh, recorded = torch.npu.Event(), torch.npu.Event(True), torch.npu.Event(enable_timing=True)
    plain.record()
    recorded.record()
    for first, last in ((plain, recorded), (recorded, plain), (fresh, recorded), (recorded, fresh)):
        with pytest.raises(ValueError, match="enable_timing=True and recorded"):
            first.elapsed_time(last)


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


def test_a_custom_function_is_told_about_mixed_precision(kind):
    amp = importlib.import_module("torch_npu.npu.amp")

    class Twice(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            assert not torch.is_autocast_enabled("npu")
            return 2 * x

        @staticmethod
        @amp.custom_bwd
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, device="npu", dtype=torch.float16, requires_grad=True)
    with amp.autocast():
        y = Twice.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "1"}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}], ids=str)
def test_a_process_of_a_launch_finds_the_cpu_under_its_rank(cpu, monkeypatch, variables):
    """Every NPU of the launch is there, as on the machine that the script was written for; one more is not."""
    npu, x = torch.npu, torch.arange(3.0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert npu.device_count() == 2
    assert npu.current_device() == 1
    for rank in (0, 1):
        for device in (rank, f"npu:{rank}", torch.device("npu", rank), torch.device(f"npu:{rank}")):
            npu.set_device(device)
            npu.synchronize(device)
            with npu.device(device):
                assert torch.equal(x.npu(device), x)
        for moved in (x.npu(rank), x.to(rank), x.to(f"npu:{rank}"), torch.arange(3.0, device=rank)):
            assert torch.equal(moved, x)
    for refused in (lambda: npu.set_device(2), lambda: x.to("npu:2"), lambda: x.to(2), lambda: torch.device("npu", 2)):
        with pytest.raises(RuntimeError, match=r"'npu:2' does not exist: .*, as 'npu:0' to 'npu:1'"):
            refused()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"'npu:1' does not exist: .*, as 'npu:0'"):
        npu.set_device(1)


def test_another_device_does_not_exist_on_a_cpu(cpu):
    npu = torch.npu
    for refused in (
        lambda: npu.set_device(1), lambda: npu.set_device("npu:1"), lambda: npu.device(1).__enter__(),
        lambda: npu.synchronize(2), lambda: npu.get_device_name("npu:1"), lambda: npu.memory_allocated(1),
        lambda: npu.Stream(1), lambda: npu.current_stream("npu:3"), lambda: npu.set_device(torch.device("meta")),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="does not exist: the only device is the CPU, as 'npu:0'"):
            refused()


def of(module, name):
    """As `from module import name` does it."""
    exec(f"from {module} import {name}", {})


MISSING = {
    "torch.npu.foo": (lambda: torch.npu.foo, AttributeError),
    "torch_npu.npu_foo": (lambda: importlib.import_module("torch_npu").npu_foo, AttributeError),
    "torch_npu.optim.NpuFusedFoo": (lambda: importlib.import_module("torch_npu.optim").NpuFusedFoo, AttributeError),
    "torch_npu.npu_fusion_attention": (lambda: of("torch_npu", "npu_fusion_attention"), ImportError),
    "torch_npu.optim.NpuFusedLamb": (lambda: of("torch_npu.optim", "NpuFusedLamb"), ImportError),
    "torch_npu.optim.NpuFusedSGD": (lambda: of("torch_npu.optim", "NpuFusedSGD"), ImportError),
    "torch_npu.profiler": (lambda: importlib.import_module("torch_npu.profiler"), ModuleNotFoundError),
    "torch_npu.contrib.foo": (lambda: importlib.import_module("torch_npu.contrib.foo"), ModuleNotFoundError),
    "mindspeed.megatron_adaptor": (lambda: importlib.import_module("mindspeed.megatron_adaptor"), ModuleNotFoundError),
    "mindspeed.ops.npu_rms_norm": (lambda: of("mindspeed.ops", "npu_rms_norm"), ImportError),
}
INSTEAD = {
    "torch_npu.npu_fusion_attention": "torch.nn.functional.scaled_dot_product_attention",
    "torch_npu.optim.NpuFusedLamb": "CONTRIBUTING.md",
    "torch_npu.optim.NpuFusedSGD": "torch.optim.SGD",
    "torch_npu.profiler": "torch.profiler",
    "mindspeed.ops.npu_rms_norm": "torch.nn.functional.rms_norm",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_does_not_exist_says_so_by_name(kind, name):
    use, error = MISSING[name]
    with pytest.raises(error) as raised:
        use()
    assert name in str(raised.value)
    assert INSTEAD.get(name, "") in str(raised.value)


def test_what_does_not_exist_can_be_asked_for(kind):
    torch_npu = importlib.import_module("torch_npu")
    assert not hasattr(torch.npu, "foo")
    assert not hasattr(torch_npu, "npu_foo")
    assert not hasattr(torch_npu.optim, "NpuFusedFoo")
    assert getattr(torch_npu, "npu_fusion_attention", None) is None


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


def test_autocast_takes_torch_npus_arguments(kind):
    autocast = importlib.import_module("torch_npu.npu.amp").autocast
    a = torch.ones(2, 2, device="npu")
    for expected, context in [
        (torch.float16, autocast()),
        (torch.float16, autocast(enabled=True)),
        (torch.bfloat16, autocast(True, torch.bfloat16)),
        (torch.bfloat16, autocast(dtype=torch.bfloat16)),
        (torch.float32, autocast(False)),
        (torch.float16, autocast(cache_enabled=False)),
    ]:
        with context:
            assert (a @ a).dtype == expected
    assert autocast()(lambda: (a @ a).dtype)() == torch.float16


class Training:
    """One parameter, and a step that takes 1 from it, if it takes any."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.param = torch.nn.Parameter(torch.zeros(2, device="npu"))
        self.optimizer = torch.optim.SGD([self.param], lr=1.0)

    def step(self, grad=1.0):
        """What the parameter and the scale are afterwards."""
        self.optimizer.zero_grad()
        self.scaler.scale((self.param * torch.tensor([1.0, grad], device="npu")).sum()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.param[0].item(), self.scaler.get_scale()


INF = float("inf")


@pytest.fixture
def scaler(kind):
    return importlib.import_module("torch_npu.npu.amp").GradScaler


def test_a_dynamic_scale_grows_and_backs_off(scaler):
    training = Training(scaler(8.0, 4.0, 0.25, 2))
    assert [training.step(grad) for grad in (1, 1, INF, 1, INF, 1, 1)] == [
        (-1, 8), (-2, 32), (-2, 8), (-3, 8), (-3, 2), (-4, 2), (-5, 8),
    ]  # fmt: skip


def test_a_static_scale_stays_but_infinite_steps_are_skipped(scaler):
    for own in (scaler(8.0, 4.0, 0.25, 1, False), scaler(init_scale=8.0, growth_interval=1, dynamic=False)):
        training = Training(own)
        grads = (1, INF, 1, float("nan"), 1)
        assert [training.step(grad) for grad in grads] == [(-1, 8), (-1, 8), (-2, 8), (-2, 8), (-3, 8)]
        own.update(16.0)
        assert training.step() == (-4, 16)


def test_a_scaler_that_is_not_enabled(scaler):
    for own in (scaler(8.0, 2.0, 0.5, 1, True, False), scaler(dynamic=False, enabled=False)):
        assert not own.is_enabled()
        assert Training(own).step() == (-1, 1)
        assert own.state_dict() == {}


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_scaler_is_saved_and_loaded(scaler, dynamic):
    training = Training(scaler(8.0, 4.0, 0.25, 3, dynamic))
    training.step()
    training.step()
    resumed = Training(scaler())
    resumed.step()
    resumed.scaler.load_state_dict(training.scaler.state_dict())
    assert resumed.scaler.state_dict() == training.scaler.state_dict()
    for grad in (1, 1, INF, 1, 1, 1):
        assert resumed.step(grad)[1] == training.step(grad)[1]
    assert (training.scaler.get_scale() != 8) == dynamic


def test_the_states_of_torchs_scaler_and_of_torch_npus_travel_both_ways(scaler):
    torchs, theirs = torch.amp.GradScaler("npu", init_scale=4.0), scaler(16.0, dynamic=False)
    state = torchs.state_dict()
    torchs.load_state_dict(theirs.state_dict())
    assert torchs.get_scale() == 16.0
    theirs.load_state_dict(state)
    assert theirs.get_scale() == 4.0
    training = Training(theirs)
    training.step(INF)
    assert theirs.get_scale() == 4.0, "torch's state does not say, so it stays as it was: static"
