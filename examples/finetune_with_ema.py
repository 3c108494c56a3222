"""Fine-tune with EmaAdamW, and evaluate with the averaged weights.

A classifier is trained on one task, then fine-tuned for a similar one, with small batches and many wrong labels. The
weights change a lot with every batch, their average does not. The step updates the average in its one pass over memory.
"""

import argparse
import copy

import torch
from torch import nn

from fusedadam import AdamW, EmaAdamW

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--steps", type=int, default=400)
steps = arguments.parse_args().steps

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
old_task = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)).to(device)  # the largest output is the class
new_task = copy.deepcopy(old_task)
with torch.no_grad():
    for p in new_task.parameters():
        p += 0.03 * torch.randn_like(p)


def data(task: nn.Module, count: int, wrong: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points and their classes; a fraction ``wrong`` of them has a random class."""
    x = torch.randn(count, 20, device=device)
    with torch.no_grad():
        y = task(x).argmax(dim=1)
    return x, torch.where(torch.rand(count, device=device) < wrong, torch.randint(5, (count,), device=device), y)


def accuracy(model: nn.Module) -> float:
    x, y = test
    with torch.no_grad():
        return (model(x).argmax(dim=1) == y).float().mean().item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, task: nn.Module, **batch: float) -> None:
    for _ in range(steps):
        x, y = data(task, **batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 5)).to(device)


test = data(new_task, 5000)
model = new_model()
train(model, AdamW(model.parameters(), lr=3e-3), old_task, count=128)
print(f"pretrained:        {accuracy(model):.1%} right")

optimizer = EmaAdamW(model.parameters(), lr=3e-3, ema_decay=0.99)
train(model, optimizer, new_task, count=16, wrong=0.4)
print(f"fine-tuned:        {accuracy(model):.1%}")

with optimizer.ema_weights():  # the model has the averaged weights here ...
    averaged = accuracy(model)
print(f"averaged weights:  {averaged:.1%}")  # ... and the trained weights again here

served = new_model()  # the deployed model has only the average
served.load_state_dict(optimizer.ema_state_dict(model))
print(f"deployed model:    {accuracy(served):.1%}")
