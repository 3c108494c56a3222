"""Launches by CUDA's driver do what Triton's own launcher does, wherever a step is taken."""

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
    """How many kernels the driver was asked for."""
    count, launch = [0], cuda_driver.Driver.launch

    def counted(*arguments):
        count[0] += 1
        launch(*arguments)

    monkeypatch.setattr(cuda_driver.Driver, "launch", counted)
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
    optimizer.step(), twin.step()
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    for _ in range(20):
        optimizer.step()
    assert not torch.cuda.current_stream().query()
    for _ in range(20):
        torch.cuda.synchronize()
        twin.step()
    assert_same([p.detach().cpu() for p in params], [p.detach().cpu() for p in twins])


def test_a_refused_launch_is_an_error():
    torch.zeros(1, device=device)
    too_large = cuda_driver.Kernel(0, (1, 1, 1), 32, 0, [])
    with pytest.raises(RuntimeError, match="CUDA reports error"):
        cuda_driver.driver().launch(too_large, 0)
    assert torch.ones(2, device=device).sum().item() == 2
