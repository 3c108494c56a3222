"""torch_npu's and MindSpeed's operators, called as optimizers call them: for some steps, into the tensors of `out`."""

import json

import torch
import torch_npu
from mindspeed.core.optimizer.fused_ema_adamw.fused_ema_adamw import fused_ema_adamw
from mindspeed.ops.npu_apply_fused_adamw_v2 import npu_apply_fused_adamw_v2
from mindspeed.ops.npu_apply_fused_ema_adamw import npu_apply_fused_ema_adamw

lr, beta1, beta2, epsilon, weight_decay = 0.01, 0.9, 0.99, 1e-6, 0.1
printed = []


def fresh():
    torch.manual_seed(3)
    torch.npu.manual_seed_all(3)
    var_in = torch.rand(64).uniform_(-32.0, 21.0).npu()
    grads = [torch.rand(64).uniform_(-0.05, 0.03).npu() for _ in range(3)]
    return var_in, torch.zeros(64).npu(), torch.zeros(64).npu(), grads


def report(name, start, grads, *tensors):
    out = [tensor.tolist() for tensor in tensors]
    printed.append({"name": name, "start": start, "grads": [g.tolist() for g in grads], "out": out})


var, m, v, grads = fresh()
start = var.tolist()
for step, grad in enumerate(grads, 1):
    var, m, v = torch_npu.npu_apply_adam_w(
        beta1 ** (step - 1), beta2 ** (step - 1), lr, weight_decay, beta1, beta2, epsilon, grad, None, False, False,
        out=(var, m, v),
    )  # fmt: skip
report("npu_apply_adam_w", start, grads, var, m, v)

for use_nesterov in (False, True):
    var, m, v, grads = fresh()
    for step, grad in enumerate(grads, 1):
        torch_npu.npu_apply_adam(
            beta1**step, beta2**step, lr, beta1, beta2, epsilon, grad, False, use_nesterov, out=(var, m, v)
        )
    report("nesterov" if use_nesterov else "npu_apply_adam", start, grads, var, m, v)

var, m, v, grads = fresh()
for grad in grads:
    norm = torch.norm(grad).item()
    var, m, v = torch_npu.npu_bert_apply_adam(lr, beta1, beta2, epsilon, grad, 0.1, norm, weight_decay, out=(var, m, v))
report("npu_bert_apply_adam", start, grads, var, m, v)

max_grad_norm = -1.0
var, m, v, grads = fresh()
for grad in grads:
    torch_npu.npu_bert_apply_adam(
        lr, beta1, beta2, epsilon, grad, max_grad_norm, 0.0, weight_decay, step_size=0.05, adam_mode=1, out=(var, m, v)
    )
report("mbart", start, grads, var, m, v)

var, m, v, grads = fresh()
for count, grad in enumerate(grads, 1):
    state_step = torch.tensor([count]).npu()
    npu_apply_fused_adamw_v2(
        param=var, grad=grad, exp_avg=m, exp_avg_sq=v, max_exp_avg_sq=None, state_step=state_step, lr=lr, beta1=beta1,
        beta2=beta2, weight_decay=weight_decay, eps=epsilon,
    )  # fmt: skip
report("npu_apply_fused_adamw_v2", start, grads, var, m, v)

var, m, v, grads = fresh()
s = var.clone()
for count, grad in enumerate(grads, 1):
    step = torch.tensor([count]).npu()
    fused_ema_adamw([grad], [var], [m], [v], [s], step, lr, 0.5, beta1, beta2, epsilon, 1, True, weight_decay)
report("fused_ema_adamw", start, grads, var, m, v, s)

var, m, v, grads = fresh()
s = var.clone()
for count, grad in enumerate(grads, 1):
    step = torch.tensor([count]).npu()
    npu_apply_fused_ema_adamw(
        grad, var, m, v, s, step, lr, 0.5, beta1, beta2, epsilon, mode=1, bias_correction=True,
        weight_decay=weight_decay,
    )  # fmt: skip
report("npu_apply_fused_ema_adamw", start, grads, var, m, v, s)

stream, begun, done = torch.Stream(device="npu"), *(torch.Event(device="npu", enable_timing=True) for _ in range(2))
begun.record(stream)
with stream:
    doubled = var * 2
done.record(stream)
torch.npu.current_stream().wait_stream(stream)
done.synchronize()
assert begun.elapsed_time(done) >= 0
assert torch.equal(doubled, var + var)

print(json.dumps(printed))
