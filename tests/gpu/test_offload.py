"""FSDP2 with CPU offload: parameters and states on the host, the mesh on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.gpu.test_gpu import OPTIMIZERS
from tests.gpu.test_sharded import mesh  # noqa: F401

pytestmark = pytest.mark.gpu


def trained(make, divide):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    divide(model)
    optimizer = make(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    for step in range(4):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        model(x.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_offloaded_parameters_are_trained_on_the_host(mesh, make):  # noqa: F811
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    offload = CPUOffloadPolicy(pin_memory=False)
    ours, optimizer = trained(make, lambda model: fully_shard(model, mesh=mesh, offload_policy=offload))
    theirs, plain = trained(make, lambda model: model.cuda())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.to_local().device.type == optimizer.state[p]["exp_avg"].to_local().device.type == "cpu"
        torch.testing.assert_close(p.to_local().detach(), q.detach().cpu(), rtol=1e-5, atol=1e-6)
    if plain.grad_norm is not None:
        torch.testing.assert_close(optimizer.grad_norm.cpu(), plain.grad_norm.cpu(), rtol=1e-5, atol=1e-6)
