"""Step counts, lr and scalars on the device: GradScaler, CUDA graphs and a tensor lr give the bits of a plain step."""

from __future__ import annotations

import copy

import pytest
import torch

import fusedadam
from fusedadam.engine.scalars import HostScalars
from tests.gpu.test_gpu import OPTIMIZERS, parameters
from tests.support import F16, F32

pytestmark = pytest.mark.gpu
SCHEDULED = {"t_total": 30, "warmup": 0.3, "schedule": "warmup_cosine"}


def twins(make, count=6, dtype=F32, **options):
    """The same parameters twice, and an optimizer for each."""
    params = parameters(count, dtype=dtype), parameters(count, dtype=dtype)
    return params, [make(p, lr=1e-2, weight_decay=0.1, **options) for p in params]


def gradients(params, step, scale=1.0, inf=False):
    for p in params:
        generator = torch.Generator().manual_seed(step)
        p.grad = (torch.randn(p.shape, generator=generator).to(p.dtype) * scale).cuda()
    if inf:
        params[-1].grad.view(-1)[-1] = float("inf")


def everything(optimizer):
    """Parameters and states, on the host."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [{k: v.cpu() for k, v in sorted(optimizer.state[p].items())} for p in params]
    return [p.detach().cpu() for p in params], states


def assert_same(a, b):
    for x, y in zip(*map(everything, (a, b)), strict=True):
        for one, two in zip(x, y, strict=True):
            if isinstance(one, dict):
                assert one.keys() == two.keys()
                assert all(torch.equal(one[k], two[k]) for k in one), {k: torch.equal(one[k], two[k]) for k in one}
            else:
                assert torch.equal(one, two)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)  # torch has no GradScaler for bfloat16 gradients
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_grad_scaler_is_served_on_the_device(make, dtype, unscaled):
    """A scale that is a power of two changes no bit: only steps without an infinity are taken, and count."""
    if unscaled and dtype == F16:
        pytest.skip("torch refuses to unscale float16 gradients")
    (ours, plain), (optimizer, other) = twins(make, dtype=dtype)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=3)
    scaler.scale(torch.zeros((), device="cuda"))  # makes the scale
    for step in range(12):
        inf = step in (0, 4, 5)
        gradients(ours, step, scaler.get_scale(), inf)
        left = [p.grad.clone() if inf else p.grad / scaler.get_scale() for p in ours]
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")  # after kernels are compiled
        try:
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not unscaled:
            assert all(torch.equal(p.grad, g) for p, g in zip(ours, left, strict=True)), "not left unscaled"
        scaler.update()
        if not inf:
            gradients(plain, step)
            other.step()
    assert_same(optimizer, other)
    assert optimizer.state[ours[0]]["step"].is_cuda
    assert optimizer.state[ours[0]]["step"].item() == 9


def test_schedules_and_warm_ups_count_on_the_device():
    for make, options in [(fusedadam.BertAdam, SCHEDULED), (fusedadam.EmaAdamW, {"ema_warmup": True})]:
        (ours, plain), (optimizer, other) = twins(make, **options)
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        scaler.scale(torch.zeros((), device="cuda"))
        for step in range(40):
            gradients(ours, step, scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            gradients(plain, step)
            other.step()
        assert_same(optimizer, other)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_kernel_for_scalars_has_the_bits_of_the_host(make, monkeypatch):
    """Groups that differ in numbers and in a tensor, which all change from step to step, and a count of many digits."""
    steppers = []
    for backend in ("triton", "eager"):  # whose scalars are computed on the host
        params, by_kernel = parameters(6), backend == "triton"
        groups = [{"params": params[:2]}, {"params": params[2:4], "weight_decay": 0.3}, {"params": params[4:]}]
        lr = torch.tensor(1e-2, device="cuda")
        groups[2]["lr"] = lr
        optimizer = make(groups, lr=1e-2, weight_decay=0.1, capturable=by_kernel, backend=backend)
        with monkeypatch.context() as patch:
            if by_kernel:
                patch.delattr(HostScalars, "of")
            for step in range(6):
                gradients(params, step)
                optimizer.step()
                lr.mul_(0.7)
                optimizer.param_groups[1]["lr"] *= 0.7
                if step == 2:
                    for k, p in enumerate(params):
                        optimizer.state[p]["step"].fill_(4094.0 + 1000 * k)
        steppers.append(optimizer)
    assert_same(*steppers)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_lr_may_be_a_tensor_on_the_device_and_change_there(make, shape):
    (ours, plain), (optimizer, other) = twins(make)
    lr = torch.full(shape, 1e-2, device="cuda", dtype=torch.float64)
    optimizer.param_groups[0]["lr"] = lr
    for step in range(5):
        gradients(ours, step)
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            optimizer.step()
            lr *= 0.5
        finally:
            torch.cuda.set_sync_debug_mode("default")
        gradients(plain, step)
        other.step()
        other.param_groups[0]["lr"] *= 0.5
    assert_same(optimizer, other)


def test_groups_differ_in_everything():
    params = parameters(8), parameters(8)
    kinds = [{}, {"lr": 3e-2}, {"betas": (0.8, 0.99)}, {"weight_decay": 0.0, "eps": 1e-6}]
    optimizers = [
        fusedadam.AdamW([{"params": p[2 * k : 2 * k + 2], **kind} for k, kind in enumerate(kinds)], **options)
        for p, options in zip(params, ({"capturable": True}, {}), strict=True)
    ]
    optimizers[0].param_groups[1]["lr"] = torch.tensor(3e-2, device="cuda", dtype=torch.float64)
    for step in range(6):
        for p, optimizer in zip(params, optimizers, strict=True):
            gradients(p, step)
            if step in (2, 3):
                p[step].grad = None  # from now on counts differ
            optimizer.step()
    assert_same(*optimizers)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_captured_step_is_replayed_with_another_lr_and_with_an_infinity(make):
    (ours, plain), (optimizer, other) = twins(make, capturable=True)
    lr = torch.tensor(1e-2, device="cuda", dtype=torch.float64)
    optimizer.param_groups[0]["lr"] = lr
    scale, found_inf = torch.tensor(4.0, device="cuda"), torch.zeros(1, device="cuda")
    optimizer.grad_scale, optimizer.found_inf = scale, found_inf
    static = [torch.zeros_like(p) for p in ours]

    def load(step):
        gradients(ours, step, 4.0)
        for s, p in zip(static, ours, strict=True):
            s.copy_(p.grad)
            p.grad = None

    def captured():
        for s, p in zip(static, ours, strict=True):
            p.grad = s * 1.0  # in the graph's own memory, as backward would put it there
        optimizer.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in range(3):
            load(step)
            captured()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    load(3)
    with torch.cuda.graph(graph):
        captured()
    rubbish, in_graph = [], [p.grad for p in ours]
    for step in range(3, 103):
        load(step)
        found_inf.fill_(float(step % 10 == 7))
        lr.fill_(1e-2 * (1 + step % 5))
        graph.replay()
        left = [s if found_inf.item() else s / 4 for s in static]
        assert all(torch.equal(a, b) for a, b in zip(in_graph, left, strict=True)), "not left unscaled"
        rubbish.append(torch.randn(1000, pin_memory=True).cuda(non_blocking=True))  # reuses what was let go
    for step in range(103):
        if step >= 3 and step % 10 == 7:
            continue
        gradients(plain, step)
        other.param_groups[0]["lr"] = 1e-2 if step < 3 else 1e-2 * (1 + step % 5)
        other.step()
    del optimizer.grad_scale, optimizer.found_inf
    assert_same(optimizer, other)
    gradients(ours, 200)  # and goes on without the graph
    optimizer.step()
    gradients(plain, 200)
    other.step()
    assert_same(optimizer, other)


def test_what_cannot_be_captured_says_why():
    def refused(optimizer, match):
        with pytest.raises(RuntimeError, match=match), torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()

    refused(fusedadam.AdamW(parameters()), "capturable=True")
    refused(fusedadam.AdamW(parameters(), capturable=True), "take a step before")
    refused(fusedadam.AdamW(parameters(), capturable=True, backend="eager"), "take a step before")
    on_host = fusedadam.AdamW(parameters(), lr=torch.tensor(1e-2), capturable=True)
    on_host.step()
    refused(on_host, "lr is a tensor on the CPU")


def test_a_state_dict_moves_between_counts_on_host_and_device():
    (ours, plain), (optimizer, other) = twins(fusedadam.AdamW, capturable=True)
    other.param_groups[0]["capturable"] = False
    for step in range(3):
        gradients(ours, step)
        optimizer.step()
    assert optimizer.state[ours[0]]["step"].is_cuda
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.param_groups[0]["capturable"] = False
    for p, q in zip(ours, plain, strict=True):
        q.data.copy_(p)
    for step in range(3, 6):
        for p, o in ((ours, optimizer), (plain, other)):
            gradients(p, step)
            o.step()
    assert_same(optimizer, other)
    assert other.state[plain[0]]["step"].device.type == "cpu"
