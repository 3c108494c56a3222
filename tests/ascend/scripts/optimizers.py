"""Every optimizer on parameters of two dtypes, of which one has no gradient."""

import json

import torch
from mindspeed.core.optimizer.fused_ema_adamw.fused_ema_adamw import FusedEmaAdamW
from torch_npu.npu.amp import GradScaler, autocast  # noqa: F401
from torch_npu.optim import NpuFusedAdamP, NpuFusedAdamW, NpuFusedBertAdam

RUNS = [
    (NpuFusedAdamW, {"lr": 2e-3, "weight_decay": 0.05}),
    (NpuFusedAdamW, {"lr": 0.1, "betas": (0.8, 0.95), "amsgrad": True}),
    (NpuFusedAdamP, {"lr": 2e-3, "eps": 1e-5, "weight_decay": 0.05}),
    (NpuFusedAdamP, {"lr": 2e-3, "delta": 100.0, "weight_decay": 0.05, "wd_ratio": 0.5, "nesterov": True}),
    (NpuFusedBertAdam, {"lr": 0.01, "warmup": 0.1, "t_total": 20, "max_grad_norm": -1}),
    (NpuFusedBertAdam, {"lr": 0.01, "schedule": "warmup_cosine", "t_total": 4, "b2": 0.999}),
    (FusedEmaAdamW, {"lr": 2e-3, "weight_decay": 0.05, "ema_decay": 0.999}),
    (FusedEmaAdamW, {"use_num_updates": False, "adam_w_mode": False, "bias_correction": False, "ema_decay": 0.5}),
]
SHAPES = [(2, 3), (4, 3), (2, 3), (4, 3), (5, 3), (18,), (2, 3)]
HALF = (2, 3, 5)


def shown(tensor):
    return {"dtype": str(tensor.dtype).split(".")[1], "values": tensor.tolist()}


def create_params():
    params = []
    for k, shape in enumerate(SHAPES):
        values = torch.arange(torch.Size(shape).numel()).reshape(shape)
        params.append((values.half() if k in HALF else values.float()).npu())
    for param in params[:-1]:
        param.requires_grad = True
    return params


printed = []
for cls, options in RUNS:
    params = create_params()
    optimizer = cls(params, **options)
    start, steps = [shown(p) for p in params], []
    for k in range(3):
        for param in params[:-1]:
            param.grad = (k - 1.5) * param.clone().detach() / 100.0
        grads = [shown(p.grad) for p in params[:-1]]
        with torch.no_grad():
            optimizer.step()
        states = [{name: shown(torch.as_tensor(t)) for name, t in optimizer.state.get(p, {}).items()} for p in params]
        steps.append({"grads": grads, "params": [shown(p) for p in params], "states": states})
    printed.append({"class": cls.__name__, "options": options, "start": start, "steps": steps})
print(json.dumps(printed))
