"""torch.set_flush_denormal(True) affects some threads only: no result may depend on it."""

from __future__ import annotations

import pytest
import torch

import fusedadam

SIZE = 300_000  # shared by threads


@pytest.fixture(params=[False, True], ids=["", "flushing"])
def flushing(request):
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this processor cannot flush denormal numbers")
    yield request.param
    torch.set_flush_denormal(False)


def tiny():
    """Parameters and gradients that are denormal in float32, made of bits: calculating would flush them."""
    generator = torch.Generator().manual_seed(0)
    bits = (torch.randint(-(2**31), -(2**31) + 2**22, (SIZE,), generator=generator) for _ in range(2))
    param, grad = (each.to(torch.int32).view(torch.float32) for each in bits)
    return torch.nn.Parameter(param), grad


def trained(make, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        param, grad = tiny()
        optimizer = make([param], lr=1e-39)
        for _ in range(3):
            param.grad = grad
            optimizer.step()
        return [param.detach(), *(value for value in optimizer.state[param].values() if value.dim())]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("make", [fusedadam.AdamW, fusedadam.EmaAdamW, fusedadam.AdamP, fusedadam.BertAdam])
def test_denormal_numbers_are_kept_by_every_thread(make, flushing):
    """By the bits: comparing would flush them."""
    results = [trained(make, threads) for threads in (1, 2, 4)]
    torch.set_flush_denormal(False)
    results.append(trained(make, 2))
    for result in results[:-1]:
        for mine, expected in zip(result, results[-1], strict=True):
            assert torch.equal(mine.view(torch.int32), expected.view(torch.int32))
    first_moment = results[-1][1]
    assert ((first_moment != 0) & (first_moment.abs() < torch.finfo(torch.float32).tiny)).any(), "nothing was denormal"


def test_the_callers_mode_is_its_own_afterwards(flushing):
    trained(fusedadam.AdamW, 2)
    smallest = torch.tensor([1e-40])
    assert ((smallest * 1).view(torch.int32) == 0).item() == flushing
