"""The same training under autocast with NpuFusedAdamW and with torch's AdamW, the scale static or dynamic."""

import json

import torch
import torch_npu  # noqa: F401
from torch import nn
from torch_npu.npu.amp import GradScaler, autocast
from torch_npu.optim import NpuFusedAdamW

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
INFINITE = 3  # the step whose gradients are not finite
device = torch.device("npu:0")


def train(make, dynamic):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).npu()
    inputs, targets = torch.randn(32, 6).npu(), torch.randn(32, 3).to(device, non_blocking=True)
    optimizer, scaler = make(model.parameters(), **OPTIONS), GradScaler(init_scale=2.0**10, dynamic=dynamic)
    steps = []
    for k in range(7):
        optimizer.zero_grad()
        with autocast():
            outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs, targets)
        scaler.scale(loss * (float("inf") if k == INFINITE else 1.0)).backward()
        scale = scaler.get_scale()
        grads = [(p.grad / scale).tolist() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moments = [
            [optimizer.state[p][name].tolist() for p in model.parameters()] for name in ("exp_avg", "exp_avg_sq")
        ]
        counts = [float(optimizer.state[p]["step"]) for p in model.parameters()]
        steps.append({
            "loss": loss.item(), "computed in": str(outputs.dtype), "scale": scale, "grads": grads,
            "params": [p.tolist() for p in model.parameters()], "moments": moments, "counts": counts,
        })  # fmt: skip
    return steps


torch.manual_seed(0)
start = [p.tolist() for p in nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).parameters()]
runs = [
    {"dynamic": dynamic, "ours": train(NpuFusedAdamW, dynamic), "torch": train(torch.optim.AdamW, dynamic)}
    for dynamic in (True, False)
]
print(json.dumps({"start": start, "options": OPTIONS, "infinite": INFINITE, "runs": runs}))
