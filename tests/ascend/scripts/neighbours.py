"""torch_npu's other fused optimizers and MindSpeed's AdamW, as a training script uses them."""

import json

import torch
import torch_npu
from mindspeed.core.optimizer.adamw import AdamW, FusedTorchAdamW
from mindspeed.optimizer.adamw import AdamW as OldAdamW
from torch_npu.optim import (
    NpuFusedAdadelta,
    NpuFusedAdam,
    NpuFusedLamb,
    NpuFusedOptimizerBase,
    NpuFusedRMSprop,
    NpuFusedRMSpropTF,
    NpuFusedSGD,
)
from torch_npu.optim.npu_fused_optim_base import NpuFusedOptimizerBase as Base

RUNS = [
    (NpuFusedSGD, {"lr": 2e-3, "momentum": 0.9, "weight_decay": 0.05, "nesterov": True}),
    (NpuFusedSGD, {"lr": 2e-3, "momentum": 0.9, "dampening": 0.5}),
    (NpuFusedAdam, {"eps": 1e-8, "betas": (0.9, 0.999), "lr": 2e-3, "weight_decay": 0.05}),
    (NpuFusedAdam, {"amsgrad": True}),
    (NpuFusedAdadelta, {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.05}),
    (NpuFusedRMSprop, {"lr": 0.01, "alpha": 0.9, "eps": 1e-8, "momentum": 0.5, "centered": True}),
    (NpuFusedRMSpropTF, {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.05, "decoupled_decay": True}),
    (NpuFusedRMSpropTF, {"centered": True, "weight_decay": 0.05}),
    (NpuFusedLamb, {"lr": 0.01, "weight_decay": 0.05, "use_global_grad_norm": True}),
    (NpuFusedLamb, {"adam": True}),
    (AdamW, {"lr": 2e-3, "maximize": True}),
    (FusedTorchAdamW, {"lr": 2e-3, "weight_decay": 0.05}),
]
SHAPES = [(2, 3), (4, 3), (18,), (5, 3)]

assert AdamW is OldAdamW
assert Base is NpuFusedOptimizerBase is torch_npu.optim.NpuFusedOptimizerBase


def create_params():
    params = [torch.arange(torch.Size(shape).numel()).reshape(shape).float().npu() / 4 for shape in SHAPES]
    for param in params[:-1]:
        param.requires_grad = True
    return params


printed = []
for cls, options in RUNS:
    params = create_params()
    optimizer = cls(params, **options)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, NpuFusedOptimizerBase) == cls.__name__.startswith("Npu")
    start, steps = [p.tolist() for p in params], []
    for k in range(3):
        optimizer.zero_grad()
        for param in params[:-1]:
            param.grad = (k - 1.5) * (param.detach() + 1) / 100.0
        grads = [p.grad.tolist() for p in params[:-1]]
        with torch.no_grad():
            optimizer.step()
        steps.append({"grads": grads, "params": [p.tolist() for p in params]})
    printed.append({"class": cls.__name__, "options": options, "start": start, "steps": steps})
print(json.dumps(printed))
