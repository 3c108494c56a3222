"""The update rules once more, in plain Python numbers or float64 tensors, sharing no code with the package.

They follow the specification's formulas line by line and are themselves tested against torch.optim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class AdamByHand:
    """Adam and AdamW for one tensor, in the dtype of what it is given."""

    def __init__(
        self,
        param: Tensor,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        maximize=False,
        decoupled=True,
    ):
        self.p, self.t = param.clone(), 0
        self.m, self.v, self.x = (torch.zeros_like(param) for _ in range(3))
        self.lr, (self.b1, self.b2), self.eps, self.wd = lr, betas, eps, weight_decay
        self.amsgrad, self.maximize, self.decoupled = amsgrad, maximize, decoupled

    def step(self, g: Tensor) -> None:
        self.t += 1
        g = -g if self.maximize else g
        if self.decoupled:
            self.p = self.p * (1 - self.lr * self.wd)
        else:
            g = g + self.wd * self.p
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        self.x = torch.maximum(self.x, self.v) if self.amsgrad else self.v
        m_hat, root = self.m / (1 - self.b1**self.t), self.x.sqrt() / math.sqrt(1 - self.b2**self.t)
        self.p = self.p - self.lr * m_hat / (root + self.eps)


class EmaAdamByHand:
    def __init__(
        self,
        param: Tensor,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        ema_decay=0.9999,
        mode=1,
        bias_correction=True,
        warmup=False,
    ):
        self.p, self.s, self.t = param.clone(), param.clone(), 0
        self.m, self.v = torch.zeros_like(param), torch.zeros_like(param)
        self.lr, (self.b1, self.b2), self.eps, self.wd = lr, betas, eps, weight_decay
        self.decay, self.mode, self.bias_correction, self.warmup = ema_decay, mode, bias_correction, warmup

    def step(self, g: Tensor) -> None:
        self.t += 1
        if self.mode == 0:
            g = g + self.wd * self.p
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        c1, c2 = (1 - self.b1**self.t, 1 - self.b2**self.t) if self.bias_correction else (1, 1)
        u = (self.m / c1) / ((self.v / c2).sqrt() + self.eps)
        if self.mode == 1:
            u = u + self.wd * self.p
        self.p = self.p - self.lr * u
        d = min(self.decay, (1 + self.t) / (10 + self.t)) if self.warmup else self.decay
        self.s = d * self.s + (1 - d) * self.p


def adamw_v2(var, grad, m, v, largest, step, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize):
    """One call of the operator as it is documented: everything in float32, each tensor rounded once on the way out."""
    p, g, first, second, top = (t.float() for t in (var, grad, m, v, largest))
    g = -g if maximize else g
    p = p * (1 - lr * weight_decay)
    first = torch.lerp(first, g, 1 - beta1)
    second = second * beta2 + g * g * (1 - beta2)
    used = torch.maximum(top, second) if amsgrad else second
    denominator = used.sqrt() / math.sqrt(1 - beta2**step) + eps
    p = p - lr / (1 - beta1**step) * first / denominator
    return p.to(var.dtype), first.to(m.dtype), second.to(v.dtype), (used if amsgrad else top).to(largest.dtype)
