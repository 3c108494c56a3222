"""An optimizer of your own in forty lines: AdaBelief (https://arxiv.org/abs/2010.07468), trained in 8 bits.

Copy this file, replace the rule, and keep the check against the formulas: docs/rules.md explains each part.
"""

import argparse
import math

import torch
from torch import nn

from fusedadam import OPTIONS, FusedOptimizer, Scalar, State, Value, Values, checks, rule
from fusedadam.ops import sqrt


def adabelief_scalars(step, lr, beta1, beta2, eps, weight_decay):
    """What is the same for all elements, computed once per step in float64."""
    return {
        "decay": 1 - lr * weight_decay, "beta1c": 1 - beta1, "beta2": beta2, "beta2c": 1 - beta2, "eps": eps,
        "step_size": lr / (1 - beta1**step), "debias2": 1 / sqrt(1 - beta2**step),
    }  # fmt: skip


@rule(scalars=adabelief_scalars)
def adabelief(
    param: Value, grad: Value, exp_avg: Value, exp_avg_var: Value, *, decay: Scalar, beta1c: Scalar, beta2: Scalar,
    beta2c: Scalar, eps: Scalar, step_size: Scalar, debias2: Scalar,
) -> Values:  # fmt: skip
    param = param * decay
    exp_avg = exp_avg + beta1c * (grad - exp_avg)
    surprise = grad - exp_avg
    exp_avg_var = beta2 * exp_avg_var + beta2c * surprise * surprise + eps
    param = param - step_size * exp_avg / (sqrt(exp_avg_var) * debias2 + eps)
    return param, exp_avg, exp_avg_var


class AdaBelief(FusedOptimizer):
    rule = adabelief
    states = {"exp_avg": State(decay="beta1"), "exp_avg_var": State(signed=False, decay="beta2")}
    options = OPTIONS | {"betas": checks.betas, "eps": checks.number}

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, **common):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **common)


def by_hand(p, grads, lr, weight_decay, beta1=0.9, beta2=0.999, eps=1e-8):
    """The paper's formulas, written out: nothing here is ours."""
    m, s = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m) ** 2 + eps
        u = m / (1 - beta1**t) / ((s / (1 - beta2**t)).sqrt() + eps)
        p = p * (1 - lr * weight_decay) - lr * u
    return p


arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--steps", type=int, default=300)
steps = arguments.parse_args().steps
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

start, grads = torch.randn(50, dtype=torch.float64), torch.randn(5, 50, dtype=torch.float64)
param = nn.Parameter(start.clone().to(device))
optimizer = AdaBelief([param], lr=1e-2, weight_decay=0.1)
for g in grads:
    param.grad = g.to(device)
    optimizer.step()
error = (param.detach().cpu() - by_hand(start, grads, 1e-2, 0.1)).abs().max().item()
print(f"largest difference to the formulas, in float64: {error:.1e}")

x = torch.linspace(-1, 1, 512, device=device)[:, None]
y = torch.sin(3 * math.pi * x) * torch.exp(-x * x)
for storage in (None, "8bit"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    if storage is not None:
        model.bfloat16()
    optimizer = AdaBelief(model.parameters(), lr=1e-2, weight_decay=0.0, storage=storage)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{storage or 'float32'}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
