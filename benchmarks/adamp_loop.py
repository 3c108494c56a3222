"""AdamP in plain torch operations, for soak_training.py: the same steps as ours, on any machine."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedadam.cli.peers import Loop


class AdamPLoop(Loop):
    """AdamP (arXiv 2006.08217), by the paper."""

    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "delta": 0.1, "wd_ratio": 0.1}

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), eps, lr, t = group["betas"], group["eps"], group["lr"], state["step"] + 1
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = exp_avg / (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**t) + eps)
        decay = lr * group["weight_decay"]
        rows = rows_without_slope(param, grad, group["delta"], eps)
        if rows:
            update = perpendicular(update, param.reshape(rows), eps)
            decay *= group["wd_ratio"]
        if decay > 0:
            param.mul_(1 - decay)
        param.sub_(update, alpha=lr / (1 - beta1**t))


def rows_without_slope(param: Tensor, grad: Tensor, delta: float, eps: float) -> tuple[int, int] | None:
    """The first view of a matrix in which every row is nearly perpendicular to its gradient: one row per channel, or
    one for the whole layer. The length of such rows hardly affects the loss."""
    if param.ndim < 2:
        return None
    for view in ((param.shape[0], -1), (1, -1)):
        rows = param.reshape(view)
        cosines = F.cosine_similarity(grad.reshape(view), rows, dim=1, eps=eps).abs()
        if cosines.max() < delta / math.sqrt(rows.shape[1]):
            return view
    return None


def perpendicular(update: Tensor, rows: Tensor, eps: float) -> Tensor:
    """``update`` without its component along each row."""
    unit: Tensor = rows / (torch.linalg.vector_norm(rows, dim=1, keepdim=True) + eps)
    changes = update.reshape(rows.shape)
    return (changes - unit * (unit * changes).sum(dim=1, keepdim=True)).reshape(update.shape)
