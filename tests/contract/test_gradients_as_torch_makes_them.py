"""Gradients whose memory does not hold their values: negated views, ZeroTensors, storages that shrank."""

from __future__ import annotations

import pytest
import torch

import fusedadam
from tests.contract.common import EVERY, assert_same, leaves

BACKENDS = pytest.mark.parametrize("backend", ["numba", "eager"])


def pair(make=fusedadam.AdamW, shapes=((3, 4), (5,), (1,)), **options):
    """Two optimizers that have taken the same plain step."""
    optimizers = [make(leaves(shapes), **options) for _ in range(2)]
    for optimizer in optimizers:
        for p in params(optimizer):
            p.grad = torch.ones_like(p)
        optimizer.step()
    return optimizers


def params(optimizer):
    return optimizer.param_groups[0]["params"]


@EVERY
@BACKENDS
def test_a_gradient_that_gains_the_negative_bit_keeps_its_sign(make, backend):
    """The compiled look at tensors did not see the bit: address and layout are the same."""
    ours, plain = pair(make, backend=backend)
    for p, q in zip(params(ours), params(plain), strict=True):
        values = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        p.grad.copy_(-values)
        p.grad = torch._neg_view(p.grad)
        q.grad.copy_(values)
    ours.step()
    plain.step()
    assert_same(ours, plain)


@EVERY
@BACKENDS
def test_zeros_without_memory_are_zeros(make, backend):
    """torch._efficientzerotensor, as forward-mode and some backward formulas return it, was read at address 0."""
    ours, plain = pair(make, backend=backend)
    for p, q in zip(params(ours), params(plain), strict=True):
        p.grad, q.grad = torch._efficientzerotensor(p.shape), torch.zeros_like(q)
    ours.step()
    plain.step()
    assert_same(ours, plain)
    for p, q in zip(params(ours), params(plain), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    ours.step()
    plain.step()
    assert_same(ours, plain)


@pytest.mark.parametrize("size", [0, 1, 4 * 3 * 4 - 1])
@pytest.mark.parametrize("what", ["param", "grad", "exp_avg"])
@pytest.mark.parametrize("backend", ["numba", "eager"])
def test_a_storage_that_shrank_under_its_tensor_is_refused(size, what, backend):
    ours, _ = pair(backend=backend)
    param = params(ours)[0]
    tensor = {"param": param.data, "grad": param.grad, "exp_avg": ours.state[param]["exp_avg"]}[what]
    before = [p.detach().clone() for p in params(ours)[1:]]
    tensor.untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match=f"{what}.*storage"):
        ours.step()
    assert all(torch.equal(p, b) for p, b in zip(params(ours)[1:], before, strict=True))


def test_a_storage_that_is_large_enough_may_change_its_size():
    buffer = torch.ones(100)
    param = torch.nn.Parameter(torch.zeros(10))
    param.grad = buffer[20:30]
    optimizer = fusedadam.AdamW([param])
    for size in (400, 200, 120):
        buffer.untyped_storage().resize_(size)
        optimizer.step()
    buffer.untyped_storage().resize_(119)
    with pytest.raises(RuntimeError, match="119 bytes is too small"):
        optimizer.step()
    assert optimizer.state[param]["step"] == 3


@pytest.mark.parametrize("what", ["param", "state"])
def test_what_is_written_needs_memory(what):
    ours, _ = pair()
    param = params(ours)[0]
    if what == "param":
        zeros = torch.nn.Parameter(torch._efficientzerotensor((3,)))
        with pytest.raises(RuntimeError, match="param is a ZeroTensor"):
            fusedadam.AdamW([zeros])
        return
    ours.state[param]["exp_avg"] = torch._efficientzerotensor((3, 4))  # given memory at the next step
    ours.step()
    assert not ours.state[param]["exp_avg"]._is_zerotensor()
    assert (ours.state[param]["exp_avg"] != 0).all()


def test_clipping_after_the_negative_bit():
    """torch's own refuses such gradients."""
    function = fusedadam.clip_grad_norm_
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, -4.0])
    assert function([param], 1.0) == 5
    memory = torch.tensor([-3.0, 4.0])
    param.grad = torch._neg_view(memory)
    assert function([param], 1.0) == 5
    torch.testing.assert_close(param.grad.resolve_neg(), torch.tensor([0.6, -0.8]))
    torch.testing.assert_close(memory, torch.tensor([-0.6, 0.8]))


def test_clipping_refuses_what_has_no_memory():
    param, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    param.grad, other.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    fusedadam.clip_grad_norm_([param, other], 100.0)
    param.grad = torch._efficientzerotensor((2,))
    with pytest.raises(RuntimeError, match="grad is a ZeroTensor"):
        fusedadam.clip_grad_norm_([param, other], 1.0)
    param.grad = torch.tensor([3.0, 4.0])
    param.grad.untyped_storage().resize_(4)
    with pytest.raises(RuntimeError, match="storage of 4 bytes is too small"):
        fusedadam.clip_grad_norm_([param, other], 1.0)
    assert other.grad.tolist() == [3, 4]


@pytest.mark.parametrize("backend", ["numba", "eager"])
def test_an_inference_tensor_with_gaps_is_stepped_in_any_mode(backend):
    """Its copy could not be copied back outside of inference mode: after the others and all counts were written."""

    def trained(inference):
        with torch.inference_mode(inference):
            base = torch.ones(3, 4)
            first = base[:, :2]
        second = torch.ones(5)
        optimizer = fusedadam.AdamW([first, second], lr=0.1, backend=backend)
        for _ in range(3):
            with torch.inference_mode(inference):
                first.grad = torch.full((3, 2), 2.0)
            second.grad = torch.full((5,), 2.0)
            optimizer.step()
        assert base[:, 2:].eq(1).all()
        return [first.clone(), second, *(state["step"] for state in optimizer.state.values())]

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


@EVERY
@BACKENDS
def test_a_step_in_inference_mode_leaves_nothing_behind_that_cannot_be_written(make, backend):
    """Buffers made there were inference tensors: the next step outside failed, after it had been counted."""

    def trained(inference):
        optimizer = make(leaves(), backend=backend)
        for step in range(4):
            for p in params(optimizer):
                p.grad = torch.full_like(p, step + 1.0)
            with torch.inference_mode(inference and step in (0, 2)):
                optimizer.step()
        return optimizer

    assert_same(trained(True), trained(False))
    optimizer = trained(True)
    assert not any(value.is_inference() for state in optimizer.state.values() for value in state.values())


def test_clipping_in_inference_mode_and_then_outside():
    param = torch.nn.Parameter(torch.zeros(2))
    for inference in (True, False, True):
        param.grad = torch.tensor([3.0, 4.0])
        with torch.inference_mode(inference):
            assert fusedadam.clip_grad_norm_([param], 1.0) == 5
        torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))
