"""clip_grad_norm_fused_ beside torch's clip_grad_norm_."""

import json

import torch
import torch_npu
from torch.nn.utils import clip_grad_norm_

OPTIMIZERS = ("NpuFusedAdamW", "NpuFusedAdamP", "NpuFusedBertAdam")


def create_params():
    generator = torch.Generator(device="npu").manual_seed(7)
    params = []
    for shape, dtype in (
        ((4, 3), torch.float32),
        ((50,), torch.float32),
        ((2, 3), torch.float16),
        ((5,), torch.float32),
    ):
        param = torch.nn.Parameter(torch.ones(shape, dtype=dtype, device="npu"))
        param.grad = torch.randn(shape, generator=generator, device="npu").to(dtype)
        params.append(param)
    params[-1].grad = None
    return params


def grads_of(params):
    return [None if p.grad is None else p.grad.float().tolist() for p in params]


printed = []
for name in OPTIMIZERS:
    for max_norm, norm_type in ((1.0, 2), (1.0, 2.0), (0.5, float("inf")), (3.0, 1), (1e6, 2)):
        ours, theirs = create_params(), create_params()
        before = grads_of(ours)
        kept = [p.grad for p in ours]
        optimizer = getattr(torch_npu.optim, name)(ours, **({"b2": 0.99} if "Bert" in name else {}))
        total = optimizer.clip_grad_norm_fused_(max_norm, norm_type)
        printed.append({
            "class": name, "max_norm": max_norm, "norm_type": str(norm_type), "before": before,
            "ours": grads_of(ours), "total": total.item(), "is tensor": torch.is_tensor(total),
            "in place": all(p.grad is g for p, g in zip(ours, kept, strict=True)),
            "torch's total": clip_grad_norm_(theirs, max_norm, norm_type).item(), "torch": grads_of(theirs),
        })  # fmt: skip
print(json.dumps(printed))
