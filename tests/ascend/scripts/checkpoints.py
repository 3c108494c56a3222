"""A training begun with one optimizer and gone on with the other: torch's AdamW and NpuFusedAdamW, both ways."""

import json
import sys
from pathlib import Path

import torch
import torch_npu  # noqa: F401
from torch_npu.optim import NpuFusedAdamW

FOLDER, OPTIONS = Path(sys.argv[1]), {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


def fresh():
    torch.manual_seed(3)
    return torch.nn.Linear(5, 4).npu()


def step(model, optimizer, k):
    for n, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(10 * k + n)
        param.grad = torch.randn(param.shape, generator=generator).npu()
    optimizer.step()
    return [p.grad.tolist() for p in model.parameters()]


printed = []
for first, second in ((torch.optim.AdamW, NpuFusedAdamW), (NpuFusedAdamW, torch.optim.AdamW)):
    for amsgrad in (False, True):
        model, path = fresh(), FOLDER / f"{first.__name__}-{amsgrad}.pt"
        start = [p.tolist() for p in model.parameters()]
        optimizer = first(model.parameters(), **OPTIONS, amsgrad=amsgrad)
        grads = [step(model, optimizer, k) for k in range(3)]
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

        saved = torch.load(path, map_location="npu:0")
        model = torch.nn.Linear(5, 4).npu()
        model.load_state_dict(saved["model"])
        optimizer = second(model.parameters(), lr=99.0)
        optimizer.load_state_dict(saved["optimizer"])
        grads += [step(model, optimizer, k) for k in range(3, 6)]
        printed.append({
            "first": first.__module__, "second": second.__module__, "amsgrad": amsgrad, "options": OPTIONS,
            "start": start, "grads": grads, "end": [p.tolist() for p in model.parameters()],
            "counts": [float(optimizer.state[p]["step"]) for p in model.parameters()],
        })  # fmt: skip
print(json.dumps(printed))
