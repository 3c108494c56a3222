"""On a GPU: gradients whose memory is not their value, options on the device, cycling betas, shared memory."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.contract.common import EVERY, assert_same, leaves, params_of, train

pytestmark = pytest.mark.gpu


def pair(make):
    return [train(make(leaves(device="cuda")), 1) for _ in range(2)]


@EVERY
def test_negated_gradients_and_zeros_without_memory(make):
    ours, plain = pair(make)
    for p, q in zip(params_of(ours), params_of(plain), strict=True):
        q.grad = torch.randn_like(q)
        p.grad.copy_(-q.grad)
        p.grad = torch._neg_view(p.grad)
    ours.step()
    plain.step()
    assert_same(ours, plain)
    for p, q in zip(params_of(ours), params_of(plain), strict=True):
        p.grad, q.grad = torch._efficientzerotensor(p.shape, device="cuda"), torch.zeros_like(q)
    ours.step()
    plain.step()
    assert_same(ours, plain)


@pytest.mark.parametrize("size", [0, 64])
def test_a_storage_that_shrank_is_refused(size):
    ours, _ = pair(fusedadam.AdamW)
    params_of(ours)[0].grad.untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match=r"grad .*storage"):
        ours.step()
    torch.cuda.synchronize()


def test_shared_memory_with_gaps_is_refused():
    m = torch.zeros(4, 6, device="cuda")[:, :3]
    p, g = torch.ones(4, 3, device="cuda"), torch.ones(4, 3, device="cuda")
    with pytest.raises(RuntimeError, match="share memory"):
        fusedadam.functional.adamw_(p, g, m, m, step=1)


@EVERY
def test_steps_in_and_out_of_inference_mode(make):
    def trained(inference):
        optimizer = make(leaves(device="cuda"))
        for step in range(4):
            for p in params_of(optimizer):
                p.grad = torch.full_like(p, step + 1.0)
            with torch.inference_mode(inference and step in (0, 2)):
                optimizer.step()
        return optimizer

    assert_same(trained(True), trained(False))


def test_options_on_the_device_are_read_and_may_change_in_place():
    beta = torch.tensor(0.99, device="cuda", dtype=torch.float64)
    ours = train(fusedadam.AdamW(leaves(device="cuda"), betas=(0.9, beta), capturable=True), 2)
    other = train(fusedadam.AdamW(leaves(device="cuda"), betas=(0.9, 0.99)), 2)
    beta.fill_(0.5)
    other.param_groups[0]["betas"] = (0.9, 0.5)
    assert_same(*([p.detach() for p in params_of(train(o, 2, start=2))] for o in (ours, other)))
    with (
        pytest.raises(RuntimeError, match="betas would have to be read from the device"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ours.step()


@pytest.mark.parametrize("way", ["plain", "scaled", "capturable"])
def test_betas_that_cycle_leave_nothing_behind_and_have_the_same_bits(way):
    def trained(way):
        optimizer = fusedadam.AdamW(leaves(device="cuda"), capturable=way == "capturable")
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=600)
        for step in range(500):
            for p in params_of(optimizer):
                p.grad = torch.full_like(p, 1.0 + step % 7)
            if way == "scaled":
                optimizer.grad_scale = torch.ones(1, device="cuda")
                optimizer.found_inf = torch.zeros(1, device="cuda")
            optimizer.step()
            schedule.step()
            if step == 100:
                early = torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() <= early + 16384, "a table for every beta"
        return [p.detach() for p in params_of(optimizer)]

    assert_same(trained(way), trained("plain"))


@EVERY
def test_tensors_that_are_copied_are_copied_in_every_step(make):
    """Steps with the options of the last one are repeated; kernels alone would work on the copies of the last one."""

    def trained(lay_out):
        optimizer = make(leaves(device="cuda"))
        for step in range(8):
            for p in params_of(optimizer):
                p.grad = lay_out(torch.full_like(p, step + 1.0))
            optimizer.step()
        return optimizer

    assert_same(trained(lambda grad: grad[..., None].repeat(*[1] * grad.dim(), 2)[..., 0]), trained(torch.clone))
