"""Launches by CUDA's driver do what Triton's own launcher does, wherever a step is taken."""

import gc
import itertools
import threading

import pytest
import torch

import fusedadam
from fusedadam.backends.triton import direct
from fusedadam.tensors import cuda_driver

pytestmark = pytest.mark.gpu
device = "cuda"

MAKERS = {
    "AdamW": fusedadam.AdamW,
    "clipped": lambda params: fusedadam.AdamW(params, max_grad_norm=0.5),
    "8bit": lambda params: fusedadam.AdamW(params, storage="8bit"),
    "capturable": lambda params: fusedadam.AdamW(params, capturable=True),
    "AdamP": fusedadam.AdamP,
    "BertAdam": lambda params: fusedadam.BertAdam(params, lr=1e-3),
    "EmaAdamW": fusedadam.EmaAdamW,
    "SGD": lambda params: fusedadam.SGD(params, momentum=0.9, dampening=0.5),
    "RMSpropTF": lambda params: fusedadam.RMSpropTF(params, momentum=0.9),
    "Lamb": fusedadam.Lamb,
}


def trained(make, device, steps=3, before=lambda: None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (7, 300), (64, 96), (3, 5, 2)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, torch.bfloat16)) for s in shapes]
    optimizer = make(params)
    for _ in range(steps):
        before()
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device, torch.bfloat16)
        optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in params] + [
        v.cpu() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    ]


def assert_same(ours, theirs):
    assert all(map(torch.equal, ours, theirs))
    assert len(ours) == len(theirs)


@pytest.fixture
def launches(monkeypatch):
    """How many kernels and graphs the driver was asked for."""
    count, launch, launch_graph = [0, 0], cuda_driver.Driver.launch, cuda_driver.Driver.launch_graph

    def counted(driver, kernels, device):
        count[0] += len(kernels)
        launch(driver, kernels, device)

    def counted_graph(driver, graph, device):
        count[1] += 1
        launch_graph(driver, graph, device)

    monkeypatch.setattr(cuda_driver.Driver, "launch", counted)
    monkeypatch.setattr(cuda_driver.Driver, "launch_graph", counted_graph)
    return count


@pytest.mark.parametrize("name", MAKERS)
def test_same_bits_as_with_tritons_launcher(name, launches, monkeypatch):
    ours = trained(MAKERS[name], device)
    assert launches[0] >= 3
    before = launches[0]
    monkeypatch.setattr(direct, "driver_of", lambda device: None)
    assert_same(ours, trained(MAKERS[name], device))
    assert launches[0] == before


def test_launch_hooks_see_every_kernel(launches, monkeypatch):
    import triton

    ours, seen = trained(fusedadam.AdamP, device), []
    owner = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
    monkeypatch.setattr(owner, "launch_enter_hook", seen.append)
    before = launches[0]
    assert_same(ours, trained(fusedadam.AdamP, device))
    assert launches[0] == before
    assert len(seen) >= 3 * 3


def test_a_thread_that_has_not_used_the_device():
    found = []
    expected = trained(fusedadam.AdamW, device)
    thread = threading.Thread(target=lambda: found.extend(trained(fusedadam.AdamW, device)))
    thread.start()
    thread.join()
    assert_same(found, expected)

    param = torch.nn.Parameter(torch.ones(4, device=device))
    param.grad = torch.ones(4, device=device)
    optimizer = fusedadam.AdamW([param], lr=0.5, weight_decay=0.0)
    optimizer.step()
    thread = threading.Thread(target=optimizer.step)  # nothing of torch's sets the device up before the launch
    thread.start()
    thread.join()
    torch.testing.assert_close(param.detach().cpu(), torch.zeros(4))


def test_steps_on_other_streams():
    expected = trained(fusedadam.AdamP, device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert_same(trained(fusedadam.AdamP, device), expected)
    streams = [torch.cuda.Stream() for _ in range(2)]
    turns = iter(range(100))

    def take_turns():
        now = streams[next(turns) % 2]
        now.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(now)

    assert_same(trained(fusedadam.AdamP, device, before=take_turns), expected)
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_a_step_behind_a_busy_stream_does_not_wait():
    """Its scalars travel with the command, and what the host writes afterwards does not reach it."""
    params = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    twins = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(3)]
    optimizer, twin = fusedadam.AdamW(params, lr=0.1), fusedadam.AdamW(twins, lr=0.1)
    for param in (*params, *twins):
        param.grad = torch.ones(5, device=device)
    steps, cycles, is_busy = 0, 500_000_000, False
    while not is_busy and cycles < 100e9:  # a busy host may need longer than the stream; a step that waits always does
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        for _ in range(20):
            optimizer.step()
        is_busy = not torch.cuda.current_stream().query()
        steps, cycles = steps + 20, 4 * cycles
    assert is_busy
    for _ in range(steps):
        torch.cuda.synchronize()
        twin.step()
    assert_same([p.detach().cpu() for p in params], [p.detach().cpu() for p in twins])


def test_a_refused_launch_is_an_error():
    torch.zeros(1, device=device)
    too_large = cuda_driver.Kernel(0, (1, 1, 1), 32, 0, [])
    with pytest.raises(RuntimeError, match="CUDA reports error"):
        cuda_driver.driver().launch([too_large], 0)
    assert torch.ones(2, device=device).sum().item() == 2


@pytest.mark.parametrize("name", MAKERS)
def test_a_graph_has_the_bits_of_single_launches(name, launches, monkeypatch):
    """Also when gradients move, options change, and a step is counted by someone else in between."""
    ours = eventful(MAKERS[name])
    graphs = launches[1]
    assert graphs >= 4
    monkeypatch.setenv("FUSEDADAM_CUDA_GRAPHS", "0")
    assert_same(ours, eventful(MAKERS[name]))
    assert launches[1] == graphs


@pytest.mark.parametrize("name", MAKERS)
def test_scheduled_steps_are_graphs_too(name, launches):
    """A learning rate that changes before every step has the bits that it has on a CPU."""

    def scheduled(params):
        optimizer = MAKERS[name if params[0].is_cuda or name != "capturable" else "AdamW"](params)
        steps = itertools.count(1)

        def set_lr(*_):
            optimizer.param_groups[0]["lr"] = 1e-2 / next(steps)

        optimizer.register_step_pre_hook(set_lr)
        return optimizer

    ours = trained(scheduled, device, steps=20)
    assert launches[1] >= 16
    assert_same(ours, trained(scheduled, "cpu", steps=20))


def eventful(make):
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(1,), (7, 300), (64, 96), (3, 5, 2)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator, device=device).bfloat16()) for s in shapes]
    optimizer = make(params)
    kept = []
    for step in range(24):
        for k, param in enumerate(params):
            is_missing = step in (9, 15) and k == 1
            param.grad = None if is_missing else torch.randn(param.shape, generator=generator, device=device).bfloat16()
            kept.append(param.grad if step % 5 == 0 else None)  # so that the next gradient is elsewhere
        if step == 12:
            optimizer.param_groups[0]["lr"] *= 0.5
        if step == 18:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 20:
            for state in optimizer.state.values():
                state["step"].add_(100)
        optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in params] + [
        v.cpu() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    ]


def test_optimizers_may_go_while_their_graphs_run():
    gc.collect()  # what other tests left in reference cycles would be freed in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(30):
        params = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(3)]
        optimizer = fusedadam.AdamP(params)
        for param in params:
            param.grad = torch.ones_like(param)
        for _ in range(5):
            optimizer.step()
        torch.cuda._sleep(1_000_000)
        optimizer.step()
        del optimizer
    torch.cuda.synchronize()
    assert params[0].isfinite().all()
    del params, param
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_another_thread_may_capture_meanwhile():
    """In the global mode, in which a capture forbids most calls to every thread."""
    params = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(3)]
    optimizer = fusedadam.AdamW(params, max_grad_norm=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):  # the next steps make a graph of their own
        optimizer.step()
    x, graph, begun, done = torch.ones(8, device=device), torch.cuda.CUDAGraph(), threading.Event(), threading.Event()

    def capture():
        with torch.cuda.graph(graph, capture_error_mode="global"):
            y = x + 1
            begun.set()
            done.wait()
            y.add_(1)

    torch.cuda.synchronize()
    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait()
    try:
        for _ in range(6):
            optimizer.step()
    finally:
        done.set()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert params[0].isfinite().all()


def test_an_optimizer_may_go_while_a_stream_is_captured():
    """In torch's usual mode, in which a call that is forbidden invalidates the capture."""
    optimizer, x, graph = graphed(), torch.ones(8, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        del optimizer
        gc.collect()
        y.add_(1)
    graph.replay()
    assert y.sum().item() == 24


def graphed():
    """An optimizer whose steps are a graph."""
    params = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(3)]
    optimizer = fusedadam.AdamW(params, max_grad_norm=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(5):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("given", ["scale and infinity", "infinity"])
def test_scaled_steps_are_graphs_too(given, launches, monkeypatch):
    def steps():
        params = [torch.nn.Parameter(torch.ones(64, 64, device=device)) for _ in range(3)]
        optimizer, kept = fusedadam.AdamP(params, max_grad_norm=1.0), []
        for step in range(12):
            for k, param in enumerate(params):
                param.grad = torch.full_like(param, 8.0 * (k + 1 + step))
            optimizer.found_inf = torch.full((), float(step in (5, 8)), device=device)
            optimizer.grad_scale = torch.full((), 8.0, device=device) if given != "infinity" else None
            kept += [optimizer.found_inf] if step % 4 == 0 else []  # the next one is elsewhere
            optimizer.step()
        return [p.detach().cpu() for p in params] + [optimizer.state[params[0]]["step"].cpu()]

    ours = steps()
    assert launches[1] >= 6
    assert ours[-1] == 10
    monkeypatch.setenv("FUSEDADAM_CUDA_GRAPHS", "0")
    assert_same(ours, steps())


def test_steps_without_a_scaler_do_not_ask_the_memory_of_its_infinities():
    param = torch.nn.Parameter(torch.ones(64, device=device))
    optimizer, found_inf = fusedadam.AdamW([param]), torch.zeros((), device=device)
    param.grad, optimizer.found_inf = torch.ones_like(param), found_inf
    for _ in range(4):
        optimizer.step()
    optimizer.found_inf = None
    found_inf.fill_(1.0)  # as whatever is there next may do
    for _ in range(6):
        optimizer.step()
    assert optimizer.state[param]["step"] == 10


def test_a_profiler_sees_the_kernels_of_a_graph():
    optimizer = graphed()
    with torch.profiler.profile() as profile:
        optimizer.step()
        torch.cuda.synchronize()
    optimizer.step()
    names = [event.name for event in profile.events()]
    assert any("Optimizer.step#AdamW.step" in name for name in names)
    assert sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()) >= 3
