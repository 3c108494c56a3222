"""Properties that only a GPU can show: steps do not wait for the device, streams, huge tensors, memory."""

from __future__ import annotations

import functools

import pytest
import torch

import fusedadam
from fusedadam.functional import adamw_
from tests.support import BF16, F32

pytestmark = pytest.mark.gpu
OPTIMIZERS = [
    fusedadam.AdamW,
    fusedadam.Adam,
    fusedadam.EmaAdamW,
    fusedadam.AdamP,
    fusedadam.BertAdam,
    pytest.param(functools.partial(fusedadam.AdamW, max_grad_norm=1.0), id="AdamW clipped"),
    pytest.param(functools.partial(fusedadam.AdamP, max_grad_norm=1.0, nesterov=True), id="AdamP clipped"),
    pytest.param(functools.partial(fusedadam.BertAdam, clip="group"), id="BertAdam by group"),
]
SHAPES = [(1000,), (30, 100), (3, 9000), (500, 9), (2000, 3), (7, 5, 3, 3)]


def parameters(count=5, device="cuda", dtype=F32):
    generator = torch.Generator().manual_seed(0)
    shapes = [SHAPES[k % len(SHAPES)] for k in range(count)]
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
    return params


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_a_step_does_not_wait_for_the_device(optimizer_class):
    params = parameters()
    optimizer = optimizer_class(params)
    optimizer.step()  # tables are built and kernels compiled here
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        for p in params:
            p.grad = p.grad.clone()  # other addresses
        optimizer.step()
        assert optimizer.grad_norm is None or optimizer.grad_norm.is_cuda
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_training_on_a_gpu_gives_the_bits_of_a_cpu(optimizer_class, dtype):
    on_cpu, on_gpu = parameters(6, device="cpu", dtype=dtype), parameters(6, dtype=dtype)
    optimizers = [optimizer_class(p, lr=1e-2, weight_decay=0.1) for p in (on_cpu, on_gpu)]
    for step in range(50):
        for p, q in zip(on_cpu, on_gpu, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            q.grad = p.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(p, q.cpu())
        for name, value in optimizers[0].state[p].items():
            assert torch.equal(value, optimizers[1].state[q][name].cpu()), name


def test_equals_torch_fused():
    ours, theirs = parameters(), parameters()
    a, b = fusedadam.AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_runs_on_the_current_stream():
    """The gradient is written late, on the same side stream: a step on any other stream would not see it."""
    (param,) = parameters(1)
    optimizer = fusedadam.AdamW([param], lr=1.0, betas=(0.0, 0.0), weight_decay=0.0)
    optimizer.step()
    before = param.detach().clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        param.grad.fill_(-1.0)
        optimizer.step()
    stream.synchronize()
    torch.testing.assert_close(param.detach(), before + 1.0)


def test_several_devices_and_dtypes_in_one_group():
    params = [*parameters(2), *parameters(2, device="cpu"), *parameters(2, dtype=BF16)]
    clipped = fusedadam.AdamW([torch.nn.Parameter(p.detach().clone()) for p in params], lr=1e-2, max_grad_norm=1.0)
    for p, q in zip(clipped.param_groups[0]["params"], params, strict=True):
        p.grad = q.grad
    clipped.step()
    norm = sum(p.grad.double().square().sum().item() for p in params) ** 0.5
    assert clipped.grad_norm.item() == pytest.approx(norm, rel=1e-6)
    alone = [p.detach().clone() for p in params]
    optimizer = fusedadam.AdamW(params, lr=1e-2)
    optimizer.step()
    assert len(optimizer._stepper.last_plan.launches) == 3
    for p, start in zip(params, alone, strict=True):
        adamw_(start, p.grad, torch.zeros_like(start), torch.zeros_like(start), step=1, lr=1e-2, weight_decay=1e-2)
        assert torch.equal(p.detach(), start)


def test_moving_a_model_between_steps_is_simply_noticed():
    model = torch.nn.Linear(30, 20)
    optimizer = fusedadam.AdamW(model.parameters())
    for device in ("cpu", "cuda", "cpu"):
        model.to(device)
        model(torch.ones(2, 30, device=device)).sum().backward()
        optimizer.step()
        assert all(optimizer.state[p]["exp_avg"].device.type == device for p in model.parameters())
        optimizer.zero_grad()
    assert optimizer.state[model.weight]["step"] == 3


def test_capture_is_refused_with_a_reason():
    params = parameters()
    optimizer = fusedadam.AdamW(params)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parameters_on_a_device_that_is_not_the_current_one():
    there, here = parameters(device="cuda:1"), parameters(device="cuda:0")
    with torch.cuda.device(0):
        fusedadam.AdamW(there).step()
    fusedadam.AdamW(here).step()
    assert all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(there, here, strict=True))


def test_more_than_2_to_the_31_elements():
    """Offsets of 32 bits crash there, or silently skip the rest: both sides of the border, and the very end."""
    size = 2**31 + 7
    roles = [torch.full((size,), value, dtype=BF16, device="cuda") for value in (0.5, 0.25, 0.125, 0.0625)]
    spots = [slice(0, 5), slice(2**31 - 5, 2**31 + 5), slice(size - 5, size)]
    for role in roles:
        for k, spot in enumerate(spots):
            role[spot] *= k + 2
    small = [torch.cat([role[spot] for spot in spots]) for role in roles]
    adamw_(*roles, step=3, lr=0.1, weight_decay=0.1)
    adamw_(*small, step=3, lr=0.1, weight_decay=0.1)
    for large, expected in zip(roles, small, strict=True):
        assert torch.equal(torch.cat([large[spot] for spot in spots]), expected)
    others = torch.ones(size, dtype=torch.bool, device="cuda")
    for spot in spots:
        others[spot] = False
    plain = [torch.full((1,), value, dtype=BF16, device="cuda") for value in (0.5, 0.25, 0.125, 0.0625)]
    adamw_(*plain, step=3, lr=0.1, weight_decay=0.1)
    assert (roles[0] == plain[0]).logical_or_(others.logical_not_()).all()


def test_extra_memory_of_a_step_is_under_one_percent():
    param = torch.nn.Parameter(torch.randn(64 * 2**20, device="cuda"))
    param.grad = torch.randn_like(param)
    optimizer = fusedadam.AdamW([param])
    optimizer.step()
    optimizer._stepper.forget_plans()  # building the tables counts as well
    optimizer._stepper.last_plan = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 0.01 * param.numel() * 4


@pytest.mark.parametrize("shape", [(2**20, 9), (1, 2**24), (2**22, 1), (4096, 4096)], ids=str)
def test_extra_memory_of_adamp_is_sixteen_bytes_a_row(shape):
    param = torch.nn.Parameter(torch.randn(shape, device="cuda"))
    param.grad = torch.randn_like(param)
    optimizer = fusedadam.AdamP([param])
    optimizer.step()
    optimizer._stepper.forget_plans()  # building the tables counts as well
    optimizer._stepper.last_plan = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 0.01 * param.numel() * 4 + 16.5 * shape[0] + 2**17


def test_clip_grad_norm_does_not_wait_for_the_device():
    params = parameters()
    fusedadam.clip_grad_norm_(params, 1.0)
    norm = torch.nn.utils.get_total_norm([p.grad for p in params])
    assert norm.item() == pytest.approx(1.0, rel=1e-5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fusedadam.clip_grad_norm_(params, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_adamp_with_more_than_2_to_the_31_elements():
    """Rows on both sides of the border move as they do alone."""
    param = torch.full((2**17 + 1, 2**14), 0.5, dtype=BF16, device="cuda")
    grad = torch.full_like(param, 0.25)
    param[2**17 - 1 :] *= 2
    some = torch.nn.Parameter(param[2**17 - 1 :].clone())
    some.grad = grad[2**17 - 1 :].clone()
    whole = torch.nn.Parameter(param)
    whole.grad = grad
    for p in (some, whole):
        fusedadam.AdamP([p], lr=0.1, weight_decay=0.1).step()
    assert torch.equal(whole[2**17 - 1 :], some)
    assert whole[:-2].eq(whole[0, 0]).all()


def test_host_and_device_memory_are_flat_over_many_steps():
    params = parameters()
    optimizer = fusedadam.AdamW(params)

    def train(steps):
        for _ in range(steps):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    few = train(20)
    assert train(500) <= few  # what other tests left behind may go meanwhile


def test_gradient_scaler_skips_a_step_with_an_infinity():
    params = parameters()
    optimizer, scaler = fusedadam.AdamW(params), torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.ones(1, device="cuda"))
    before = [p.detach().clone() for p in params]
    params[1].grad[3] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    params[1].grad[3] = 1.0
    scaler.step(optimizer)
    assert not torch.equal(params[0], before[0])
    assert optimizer.state[params[0]]["step"] == 1
