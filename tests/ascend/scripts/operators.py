"""MindSpeed's two operators, called by themselves for some steps."""

import json

import torch
import torch_npu  # noqa: F401
from mindspeed.ops.npu_apply_fused_adamw_v2 import npu_apply_fused_adamw_v2
from mindspeed.ops.npu_apply_fused_ema_adamw import npu_apply_fused_ema_adamw

printed = []


def shown(tensor):
    return {"dtype": str(tensor.dtype).split(".")[1], "values": tensor.tolist()}


def filled(value, dtype=torch.float32):
    return torch.full((10, 10), value).to(dtype).npu()


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for amsgrad, maximize in ((False, False), (True, False), (True, True)):
        var, grad, m, v = (filled(value, dtype) for value in (0.5, 0.5, 0.9, 0.9))
        max_grad_norm = filled(0.9)
        lr, beta1, beta2, weight_decay, eps = 1e-3, 0.9999, 0.9999, 0.1, 1e-8
        for count in (1, 2, 3):
            step = torch.full((1,), count).to(torch.int64).npu()
            npu_apply_fused_adamw_v2(
                var, grad, m, v, max_grad_norm, step, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize
            )
            tensors = {"p": var, "grad": grad, "m": m, "v": v, "x": max_grad_norm}
            options = {"amsgrad": amsgrad, "maximize": maximize}
            printed.append({"operator": "adamw", **options, **{name: shown(t) for name, t in tensors.items()}})

    for mode, bias_correction in ((1, True), (0, True), (1, False)):
        grad, var, m, v, s = (filled(value, dtype) for value in (0.25, 0.5, 0.0, 0.0, 0.5))
        for count in (1, 2, 3):
            step = torch.tensor([count]).npu()
            options = {"mode": mode, "bias_correction": bias_correction}
            npu_apply_fused_ema_adamw(
                grad, var, m, v, s, step, lr=1e-2, ema_decay=0.75, beta2=0.99, weight_decay=0.1, **options
            )
            tensors = {"p": var, "grad": grad, "m": m, "v": v, "s": s}
            printed.append({"operator": "ema", **options, **{name: shown(t) for name, t in tensors.items()}})

print(json.dumps(printed))
