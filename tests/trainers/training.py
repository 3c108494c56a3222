"""Shared by the tests of trainers: a small regression, our optimizer and torch's for it, and the comparison.

Adam's second moments hide a scale of the gradients; a large ``eps`` makes it visible, so that lost clipping or scaling
shows.
"""

from __future__ import annotations

import torch
from torch import nn

import fusedadam

OPTIONS = {"lr": 2e-2, "betas": (0.8, 0.95), "eps": 0.1, "weight_decay": 0.1}
BATCH = 8


def ours(params, make=fusedadam.AdamW, **options):
    return make(params, **OPTIONS, **options)


def torchs(params, **options):
    return torch.optim.AdamW(params, **OPTIONS, **options)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def dataset(size: int = 4 * BATCH) -> torch.utils.data.TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, 10 * x[:, :1] * x[:, 1:2])


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(dataset(), batch_size=BATCH)


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x).float(), y)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def weights(model: nn.Module):
    return [p.detach().cpu().clone() for p in model.parameters()]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer):
    """Parameters, and the states of each."""
    return weights(model), [dict(optimizer.state[p]) for p in model.parameters()]


def assert_same_bits(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def far(one, other, distance: float) -> bool:
    return max((p - q).abs().max().item() for p, q in zip(one, other, strict=True)) > distance
