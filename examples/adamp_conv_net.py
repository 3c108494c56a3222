"""Compares AdamP and AdamW on a small convolutional network: watch the norms of the weights.

A convolution before a batch norm is scale-invariant: its norm does not matter. Momentum nevertheless makes the norm
grow, which makes every later step relatively smaller. AdamP removes the part of a step that only changes the norm.
"""

import argparse

import torch
from torch import Tensor, nn

import fusedadam

SIZE, CLASSES = 16, 4

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--steps", type=int, default=100)
steps = arguments.parse_args().steps
device = "cuda" if torch.cuda.is_available() else "cpu"


def pictures(count: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of stripes, and the direction of the stripes."""
    at = torch.arange(SIZE, device=device, dtype=torch.float32)
    row, column = at[:, None].expand(SIZE, SIZE), at[None, :].expand(SIZE, SIZE)
    directions = torch.stack([row, column, row + column, row - column])
    kind = torch.randint(CLASSES, (count,), device=device)
    phase = 6.28 * torch.rand(count, 1, 1, device=device)
    stripes = torch.sin(directions[kind] * 0.9 + phase)
    return (stripes + 1.5 * torch.randn_like(stripes))[:, None], kind


def network() -> nn.Sequential:
    def block(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2)]

    torch.manual_seed(0)
    pooled = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 32), pooled, nn.Flatten(), nn.Linear(32, CLASSES))


def norm(model: nn.Module) -> float:
    """The norm of all convolutions together."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    return torch.sqrt(sum(weight.detach().square().sum() for weight in weights)).item()


results = {}
for cls in (fusedadam.AdamW, fusedadam.AdamP):
    model = network().to(device)
    before = norm(model)
    optimizer = cls(model.parameters(), lr=5e-3, weight_decay=1e-2)
    torch.manual_seed(1)  # the same pictures for both
    for _ in range(steps):
        x, y = pictures(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = pictures(1000)
    right = (model.eval()(x).argmax(dim=1) == y).float().mean().item()
    results[cls.__name__] = norm(model) / before
    print(f"{cls.__name__}: {right:.1%} right, convolutions {results[cls.__name__]:.2f} times as long as at the start")

# How AdamP projected each parameter in its last step: by channel, by layer, or not at all.
done = optimizer.projections()
for name, parameter in model.named_parameters():
    print(f"  {name:10} {tuple(parameter.shape)!s:18} projected: {done[parameter]}")
