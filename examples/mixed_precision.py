"""Mixed precision: float16 with a GradScaler on a GPU, bfloat16 on a CPU.

float16 has a small exponent range, in which small gradients would vanish. So the loss is scaled up before backward, and
a step with infinite gradients is skipped. The kernels unscale and skip, so the host does not wait for the device.
bfloat16 has the exponent range of float32, and needs no scaler.
"""

import argparse

import torch
from torch import nn

from fusedadam import AdamW

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--steps", type=int, default=100)
steps = arguments.parse_args().steps

torch.manual_seed(0)
on_gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.float16) if on_gpu else ("cpu", torch.bfloat16)
if on_gpu:
    print(f"{torch.cuda.get_device_name()}: float16 with a GradScaler")
else:
    print("no GPU here: bfloat16 on the CPU, which needs no GradScaler")

model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1)).to(device)
target = nn.Linear(32, 1).to(device).requires_grad_(False)
optimizer = AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)  # compared with the norm of the unscaled gradients
scaler = torch.amp.GradScaler(device, enabled=on_gpu)  # passes everything through if not enabled

for step in range(1, steps + 1):
    x = torch.randn(64, 32, device=device)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=dtype):
        prediction = model(x)
        loss = nn.functional.mse_loss(prediction.float(), target(x).sin().float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step == 1 or step % max(1, steps // 5) == 0:
        print(f"step {step:4}: loss {loss.item():.4f}, norm {optimizer.grad_norm.item():.3f}")

# Only matrix products ran in low precision: parameters and moments are float32.
state = optimizer.state[model[0].weight]
print(f"computed in {prediction.dtype}; stored: weight {model[0].weight.dtype}, moments {state['exp_avg'].dtype}")
taken = int(state["step"])
print(f"{taken} of {steps} steps taken, {steps - taken} skipped (the scale is {scaler.get_scale():g})")
