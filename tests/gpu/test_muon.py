"""Muon's products on a GPU: large matrices, and whole steps beside torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch

from fusedadam import Muon
from fusedadam.rules.newton_schulz import NAMED, NewtonSchulz, coefficients_of
from tests.backends import test_orthogonal as small
from tests.support import BF16, F32, F64

pytestmark = [pytest.mark.gpu, small.pytestmark]
SHAPES = [(768, 3072), (3072, 768), (768, 768), (300, 500), (130, 70), (64, 64), (1664, 2101)]
needs_torchs = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@pytest.mark.parametrize("shape", [(1024, 2816), (2816, 1024), (1664, 1701), (2101, 1600)], ids=str)
def test_large_matrices(shape):
    stack, method = small.drawn(2, *shape), NewtonSchulz()
    queue = small.queue(stack.clone(), method)
    assert all(kernel.direct is not None for kernel in queue.kernels)
    assert (small.distances(small.result(stack), small.exact(stack, method)) < 0.005).all()
    assert torch.equal(small.result(stack, at_once=1), small.result(stack))


def test_three_decades():
    s = torch.logspace(0, -3, 1024, dtype=F64)
    u, v = (torch.linalg.qr(torch.randn(n, 1024, dtype=F64, device="cuda"))[0] for n in (1024, 2816))
    stack = ((u * s.cuda()) @ v.T).to(F32)[None]
    assert small.distances(small.result(stack), small.exact(stack, NewtonSchulz())) < 0.008


@pytest.mark.parametrize("name", NAMED)
def test_every_spectrum(name):
    for steps in range(1, 11):
        small.assert_as_good_as_bfloat16(small.hard_stack(256, 640), NewtonSchulz(coefficients_of(name, steps)))


def trained(make, dtype, steps=4, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).cuda().to(dtype)) for s in shapes]
    optimizer = make(params, lr=0.05, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).cuda().to(dtype)
        optimizer.step()
    return [p.detach() for p in params], optimizer


@needs_torchs
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_steps_are_as_close_to_float64_as_torchs(dtype):
    ideal, _ = trained(Muon, F64)
    (ours, optimizer), (theirs, _) = trained(Muon, dtype, state_dtype=dtype), trained(torch.optim.Muon, dtype)
    assert optimizer._stepper.last_plan.launches._joined is not None  # one graph
    for e, p, q in zip(ideal, ours, theirs, strict=True):
        assert (p - e).norm() <= 1.05 * (q - e).norm()


def test_groups_and_scalars_on_the_device_have_the_same_bits():
    expected, _ = trained(Muon, F32)
    apart, _ = trained(lambda params, **o: Muon([{"params": [p]} for p in params], **o), F32)
    capturable, _ = trained(Muon, F32, capturable=True)
    again, _ = trained(Muon, F32)
    for found in (apart, capturable, again):
        for p, q in zip(found, expected, strict=True):
            assert torch.equal(p, q)


def test_scratch_memory_is_bounded():
    _, optimizer = trained(Muon, F32, 1, [(2048, 2048)] * 12)
    launches = optimizer._stepper.last_plan.launches
    (nbytes,) = {launch.table.operands.untyped_storage().nbytes() for launch in launches}
    assert 12 * 2048 * 2048 * 4 < nbytes <= 512 << 20
